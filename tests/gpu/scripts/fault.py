"""A kernel that writes to an address that is not mapped, for which the driver logs an Xid."""

from __future__ import annotations

import ctypes

import torch

# The oldest target that the compilers of current drivers know; they compile it for any newer GPU.
_PTX = """
.version 6.3
.target sm_{target}
.address_size 64
.visible .entry write_to_nowhere()
{{
    .reg .u64 %address;
    .reg .u32 %value;
    mov.u64 %address, 64;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}}
"""


def write_to_nowhere() -> None:
    """Raises RuntimeError, as torch does after any illegal access; this process cannot use the GPU afterwards."""
    torch.cuda.synchronize()  # the current context is torch's
    major, minor = torch.cuda.get_device_capability()
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    source = _PTX.format(target=min(75, 10 * major + minor)).encode()
    _check(driver.cuModuleLoadData(ctypes.byref(module), source))
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"write_to_nowhere"))
    _check(driver.cuLaunchKernel(function, *(6 * [ctypes.c_uint(1)]), ctypes.c_uint(0), None, None, None))
    torch.cuda.synchronize()


def _check(result: int) -> None:
    if result != 0:
        raise OSError(f"the CUDA driver answered {result}")


if __name__ == "__main__":
    write_to_nowhere()
