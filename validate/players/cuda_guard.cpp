// A device guard for CUDA that does nothing, and hooks that claim one idle device: enough for a torch without CUDA, or
// without a driver for it, to run autograd on fake tensors that say they are on CUDA. Loaded before torch, which asks for its
// hooks once. A build with CUDA registers a guard of its own when it is loaded, so `claim_cuda` puts this one back after it;
// its hooks have the usual priority, and those below come before them in either order.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
#ifdef BUILT_WITH_CUDA
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#endif

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuardImpl<DeviceType::CUDA>)
}

extern "C" void claim_cuda() {
  static const c10::impl::DeviceGuardImplRegistrar again(
      c10::DeviceType::CUDA, new c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>());
}

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
