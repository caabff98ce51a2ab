"""Load a compiled kernel and launch it at the lowest cost on the host.

A signature is one letter a parameter of the kernel, in order, as in `struct`:

    P  pointer        i I  int32, uint32        q Q  int64, uint64        f d  float, double
    48s               a struct of 48 bytes passed by value, given as bytes

All values of a launch are packed by one call into one buffer that the driver reads; the addresses in it never change, nor, from
one launch to the next, does what else the driver is told: grid, threads, stream. On the host a launch costs about 0.6
microseconds here and in the driver's binding, and then what the driver itself takes. docs/kernels.md, "On the host".
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from impls.cuda.jit import Kernel

NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_PARAMETER = re.compile(r"[PiIqQfd]|\d+s")


class CudaError(Exception):
    """A call of the CUDA driver that failed: says which call, for which kernel, and the driver's own words."""


class Packer:
    """Kernel parameters in one buffer; `address` is what cuLaunchKernel takes. Needs no driver.

    pack(*values) puts the values of all parameters; raises struct.error when their number or types differ from the signature.
    `buffer` is where they lie, as `struct` lays them out, for who rewrites a part.
    """

    def __init__(self, signature: str) -> None:
        signature = signature.replace(" ", "")
        parameters = _PARAMETER.findall(signature)
        if "".join(parameters) != signature:
            raise ValueError(f"signature {signature!r} must hold only P, i, I, q, Q, f, d and sizes such as 48s")
        offsets = [struct.calcsize("@" + "".join(parameters[:n]) + "0" + p[-1]) for n, p in enumerate(parameters)]
        self.sizes = [struct.calcsize("@" + parameter) for parameter in parameters]
        layout = struct.Struct("@" + signature)
        held = ctypes.create_string_buffer(max(layout.size, 1))
        base, self.buffer = ctypes.addressof(held), memoryview(held).cast("B")
        self._pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(base + offset for offset in offsets))
        self.address = ctypes.addressof(self._pointers)
        self.pack = functools.partial(layout.pack_into, self.buffer, 0)


class Launcher:
    """A kernel loaded on its device, which must be torch's current one: launch(grid, threads, stream, *values).

    An `early` one may begin before the launch before it in the stream ends, and waits for that itself: early.cuh. Compute
    capability 9.0 and newer.
    """

    def __init__(self, kernel: Kernel, signature: str, shared_bytes: int, early: bool = False) -> None:
        import torch
        from cuda.bindings import driver

        self._entry, self._shared_bytes = kernel.entry, shared_bytes
        self.parameters = Packer(signature)
        self._launch, self._config = driver.cuLaunchKernelEx, config_of(driver, shared_bytes, early)
        self._told: tuple[Any, ...] = ()
        self._device = device_index(str(kernel.device))
        with torch.cuda.device(self._device):
            self._enter(driver)
            self._load(driver, kernel)

    def __call__(self, grid: tuple[int, int, int], threads: int, stream: int, *values: Any) -> None:
        """Launch `grid` CTAs of `threads` threads on the raw `stream`. An empty grid launches nothing."""
        self.parameters.pack(*values)
        self.enqueue(grid, threads, stream)

    def enqueue(self, grid: tuple[int, int, int], threads: int, stream: int) -> None:
        """As a call, with what `parameters` hold."""
        if (grid, threads, stream) != self._told:
            if not all(grid):
                return
            self._tell(grid, threads, stream)
        answer = self._launch(self._config, self._function, self.parameters.address, 0)
        if answer[0]:
            self._again(answer)

    def _tell(self, grid: tuple[int, int, int], threads: int, stream: int) -> None:
        """Write down where and how large; it stays for the launches to come."""
        config, self._told = self._config, ()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.hStream = threads, stream
        self._told = (grid, threads, stream)

    def _again(self, answer: tuple[Any, ...]) -> None:
        """Launch once more where the thread had no context, since it has not used its device yet; raise all else."""
        from cuda.bindings import driver

        if answer[0] == NO_CONTEXT:
            self._enter(driver)
            answer = self._launch(self._config, self._function, self.parameters.address, 0)
        grid, threads, _ = self._told
        self._must(f"cuLaunchKernelEx of grid {grid}, {threads} threads", answer)

    def _enter(self, driver: Any) -> None:
        """Make the context that torch uses the thread's own: tensors and streams live in it.

        A new thread has none until a call of the runtime needs one, which taking memory that torch has in stock is not.
        """
        device = self._must("cuDeviceGet", driver.cuDeviceGet(self._device))
        context = self._must("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))
        self._must("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))

    def _load(self, driver: Any, kernel: Kernel) -> None:
        self._library = self._must("cuLibraryLoadData", driver.cuLibraryLoadData(kernel.cubin, [], [], 0, [], [], 0))
        handle = self._must("cuLibraryGetKernel", driver.cuLibraryGetKernel(self._library, kernel.entry.encode()))
        self._check_signature(driver, handle)
        self._function = self._must("cuKernelGetFunction", driver.cuKernelGetFunction(handle))
        if self._shared_bytes + kernel.resources["shared_bytes"] > 48 * 1024:  # more than this must be asked for
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._must("cuFuncSetAttribute", driver.cuFuncSetAttribute(self._function, attribute, self._shared_bytes))

    def _check_signature(self, driver: Any, handle: Any) -> None:
        """A parameter list that differs from the kernel's would be read as garbage; the driver knows the right sizes."""
        sizes: list[int] = []
        while True:
            status, _, size = driver.cuKernelGetParamInfo(handle, len(sizes))
            if status == driver.CUresult.CUDA_ERROR_INVALID_VALUE:  # there are no more
                break
            self._must("cuKernelGetParamInfo", (status,))
            sizes.append(size)
        if sizes != (ours := self.parameters.sizes):
            raise CudaError(f"{self._entry}: the signature's parameters have {ours} bytes, the kernel's {sizes}")

    def _must(self, call: str, answer: tuple[Any, ...]) -> Any:
        from cuda.bindings import driver

        status, *results = answer
        if status != driver.CUresult.CUDA_SUCCESS:
            _, text = driver.cuGetErrorString(status)
            raise CudaError(f"{self._entry}: {call} answered {status.name}: {(text or b'').decode()}")
        return results[0] if results else None


def config_of(driver: Any, shared_bytes: int, early: bool) -> Any:
    """Return a CUlaunchConfig that lacks the grid, the threads in x and the stream."""
    config = driver.CUlaunchConfig()
    config.blockDimY, config.blockDimZ, config.sharedMemBytes = 1, 1, shared_bytes
    if early:
        attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.id, attribute.value = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value
        config.attrs, config.numAttrs = [attribute], 1
    return config


@functools.cache
def _streams() -> Callable[[int], int]:
    import torch

    streams: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return streams


def raw_stream(device_index: int) -> int:
    """Return torch's current stream as a number, for `Launcher`; cheaper than `torch.cuda.current_stream()`."""
    return _streams()(device_index)


def device_index(device: str) -> int:
    """Return the index of "cuda:1", or of torch's current device for plain "cuda"."""
    import torch

    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else int(index)
