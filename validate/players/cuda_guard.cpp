// A device guard for CUDA that keeps the current stream and does nothing else, and hooks that claim one idle device: enough for a torch without CUDA, or
// without a driver for it, to run autograd on fake tensors that say they are on CUDA. Loaded before torch, which asks for its
// hooks once. A build with CUDA registers a guard of its own when it is loaded, so `claim_cuda` puts this one back after it;
// its hooks have the usual priority, and those below come before them in either order.
//
// Autograd's engine runs each node on the stream of its forward and lets streams wait for one another: a capture hears of it
// by the functions that it gives to `hear_streams`.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#ifdef BUILT_WITH_CUDA
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#endif

namespace c10::impl {
namespace {
thread_local StreamId current_stream = 0;

struct {
  void (*current)(int64_t stream) = nullptr;
  int64_t (*record)(int64_t stream) = nullptr;  // an event's number, from 1 on
  void (*block)(int64_t stream, int64_t event) = nullptr;
  void (*used)(uint64_t storage, int64_t stream) = nullptr;
} heard;
}  // namespace

struct IdleGuard final : DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  IdleGuard() = default;
  explicit IdleGuard(DeviceType) {}
  DeviceType type() const override { return static_type; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(static_type, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 8; }
  Stream getStream(Device device) const override { return Stream(Stream::UNSAFE, device, current_stream); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_stream = stream.id();
    if (before.id() != stream.id() && heard.current) heard.current(stream.id());
    return before;
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    if (heard.record) *event = reinterpret_cast<void*>(heard.record(stream.id()));
  }
  void block(void* event, const Stream& stream) const override {
    if (heard.block) heard.block(stream.id(), reinterpret_cast<int64_t>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const DataPtr& data, const Stream& stream) const override {
    // a tensor without values points nowhere: its storage is known by where its pointer stands
    static const StorageImpl one(StorageImpl::use_byte_size_t(), 0, DataPtr(), nullptr, false);
    static const uint64_t within = reinterpret_cast<uint64_t>(&one.data_ptr()) - reinterpret_cast<uint64_t>(&one);
    if (heard.used) heard.used(reinterpret_cast<uint64_t>(&data) - within, stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, IdleGuard)
}  // namespace c10::impl

extern "C" void claim_cuda() {
  static const c10::impl::DeviceGuardImplRegistrar again(c10::DeviceType::CUDA, new c10::impl::IdleGuard());
}

extern "C" void hear_streams(
    void (*current)(int64_t), int64_t (*record)(int64_t), void (*block)(int64_t, int64_t), void (*used)(uint64_t, int64_t)) {
  c10::impl::heard = {current, record, block, used};
}

extern "C" void set_current_stream(int64_t stream) { c10::impl::current_stream = stream; }

namespace at {
struct IdleDeviceHooks final : CUDAHooksInterface {
  explicit IdleDeviceHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

// the macro makes the name from two tokens and wants them unqualified
C10_REGISTER_TYPED_CREATOR_WITH_PRIORITY(
    CUDAHooksRegistry,
    "CUDAHooks",
    c10::REGISTRY_PREFERRED,
    RegistererCUDAHooksRegistry::DefaultCreator<IdleDeviceHooks>)
}  // namespace at

#ifdef BUILT_WITH_CUDA
namespace c10d {
// DDP's reducer times itself by CUDA's events where torch was built with CUDA: nothing happens at no time
struct IdleTimer final : Timer {
  explicit IdleTimer(c10::Device) {}
  void record(Event) override {}
  std::optional<int64_t> measureDifference(Event, Event) override { return 0; }
};
C10_REGISTER_TYPED_CREATOR_WITH_PRIORITY(
    TimerRegistry,
    c10::kCUDA,
    c10::REGISTRY_PREFERRED,
    RegistererTimerRegistry::DefaultCreator<IdleTimer>)
}  // namespace c10d
#endif
