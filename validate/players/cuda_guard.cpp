// A device guard for CUDA that does nothing, and hooks that claim one idle device: enough for a CPU-only build of torch
// to run autograd on fake tensors that say they are on CUDA. Loaded before torch, so that its registrations come first.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuardImpl<DeviceType::CUDA>)
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
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, IdleDeviceHooks)
}  // namespace at
