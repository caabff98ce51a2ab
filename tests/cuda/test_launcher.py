"""Packing kernel parameters: one buffer, one address a parameter. No GPU is needed."""

from __future__ import annotations

import ctypes
import re
import struct

import pytest
from cuda.bindings import driver as bindings
from cuda.bindings.driver import CUresult

from impls.cuda import attention, jit, prefill, split_kv, tensor_core
from impls.cuda.attention import PLANNED, POINTERS, VERIFIED, Shape
from impls.cuda.launch import CudaError, Launcher, Packer, config_of
from impls.cuda.parts import Parts


def test_each_pointer_leads_to_its_value():
    """The driver follows `address` to one pointer a parameter, and each of those to the value."""
    packer = Packer("P i q f 12s d i")
    packer.pack(0x7F00_1234_5678, -5, 2**40, 0.5, b"twelve bytes", 2.25, 7)
    pointers = (ctypes.c_void_p * 7).from_address(packer.address)
    int32 = ctypes.c_int32
    kinds = (ctypes.c_void_p, int32, ctypes.c_int64, ctypes.c_float, ctypes.c_char * 12, ctypes.c_double, int32)

    values = [kind.from_address(pointer).value for kind, pointer in zip(kinds, pointers, strict=True)]
    assert values == [0x7F00_1234_5678, -5, 2**40, 0.5, b"twelve bytes", 2.25, 7]
    assert packer.sizes == [8, 4, 8, 4, 12, 8, 4]


def test_addresses_stay_while_values_change():
    """A second launch packs into the same places."""
    packer = Packer("Pi")
    before = packer.address, list((ctypes.c_void_p * 2).from_address(packer.address))
    packer.pack(1, 2)
    packer.pack(3, 4)

    assert (packer.address, list((ctypes.c_void_p * 2).from_address(packer.address))) == before
    assert ctypes.c_int32.from_address(before[1][1]).value == 4


@pytest.mark.parametrize("signature", ["PPx", "P s", "P4", "?"])
def test_unknown_signature_is_refused(signature):
    """Only parameters of known size are packed."""
    with pytest.raises(ValueError, match="signature"):
        Packer(signature)


@pytest.mark.parametrize("values", [(1,), (1, 2, 3), (1, 2.5), (1, 2**31)])
def test_values_that_do_not_fit_are_refused(values):
    """A missing, extra, mistyped or overflowing value raises before the launch."""
    with pytest.raises(struct.error):
        Packer("Pi").pack(*values)


@pytest.mark.parametrize(
    ("source", "signature"),
    [
        ("per_token.cu", attention.SIGNATURE),
        ("block_parallel.cu", attention.SIGNATURE),
        ("split_kv.cu", split_kv.SPLIT_SIGNATURE),
        ("merge_splits.cu", split_kv.MERGE_SIGNATURE),
        ("tensor_core.cu", attention.SIGNATURE + tensor_core.OWN_SIGNATURE),
        ("tensor_core_general.cu", attention.SIGNATURE + tensor_core.OWN_SIGNATURE),
        ("prefill.cu", prefill.PREFILL_SIGNATURE),
    ],
)
def test_signature_is_the_kernels_parameter_list(source, signature):
    """Letter by letter, so that no kernel reads a pointer for a stride."""
    text = re.sub(r" (LAYER|PREFIX)_PARAMETER", "", (jit.FOLDER / source).read_text())  # without features
    parameters = re.search(r'extern "C" __global__ void .*?\(\n(.*?)\) \{', text, re.DOTALL)[1].split(",")
    letters = {"int": "i", "long long": "q", "float": "f"}
    kinds = ["P" if "*" in parameter else letters[parameter.strip().rpartition(" ")[0]] for parameter in parameters]

    assert "".join(kinds) == signature.replace(" ", "")


class Driver:
    """A driver whose calls answer from a list, and are noted."""

    CUresult = CUresult

    def __init__(self, **answers):
        self.answers, self.calls = answers, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            answers = self.answers.get(name, [(CUresult.CUDA_SUCCESS, 0)])
            return answers.pop(0) if len(answers) > 1 else answers[0]

        return call


def loaded(monkeypatch, driver, signature="Pi", early=False):
    """A launcher that was loaded by `driver`."""
    import cuda.bindings

    monkeypatch.setattr(cuda.bindings, "driver", driver)
    launcher = Launcher.__new__(Launcher)
    launcher._entry, launcher._shared_bytes, launcher._device, launcher._function, launcher._told = "kernel", 0, 0, 0, ()
    launcher.parameters, launcher._launch = Packer(signature), driver.cuLaunchKernelEx
    launcher._config = config_of(bindings, 4096, early)
    return launcher


class Noted(Driver):
    """Notes what each launch says."""

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        self.calls.append((
            (config.gridDimX, config.gridDimY, config.gridDimZ), (config.blockDimX, config.blockDimY, config.blockDimZ),
            config.sharedMemBytes, int(config.hStream), [attribute.id.name for attribute in config.attrs], parameters, extra,
        ))
        return (CUresult.CUDA_SUCCESS,)


@pytest.mark.parametrize("early", [False, True])
def test_a_launch_says_grid_threads_memory_stream_and_parameters(monkeypatch, early):
    """Each time what it was called with, whatever the launch before it said; and whether it need not wait."""
    driver = Noted()
    launcher = loaded(monkeypatch, driver, early=early)
    one = ((132, 1, 1), 256, 77)
    calls = [one, one, ((132, 1, 1), 256, 78), ((3, 4, 5), 256, 78), ((3, 4, 5), 32, 78), one]
    for grid, threads, stream in calls:
        launcher(grid, threads, stream, 1, 2)

    attributes = ["CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"] * early
    wanted = [(grid, (threads, 1, 1), 4096, stream, attributes) for grid, threads, stream in calls]
    assert [call[:5] for call in driver.calls] == wanted
    assert {call[5:] for call in driver.calls} == {(launcher.parameters.address, 0)}


def test_an_early_launch_need_not_wait():
    """The value of its attribute."""
    config = config_of(bindings, 0, early=True)

    assert (config.numAttrs, config.attrs[0].value.programmaticStreamSerializationAllowed) == (1, 1)


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_an_empty_grid_launches_nothing(monkeypatch, grid):
    """The driver would refuse it; the launch after it is as if it had not been."""
    driver = Noted()
    launcher = loaded(monkeypatch, driver)
    for called in ((2, 1, 1), grid, grid, (2, 1, 1)):
        launcher(called, 32, 0, 1, 2)

    assert [call[0] for call in driver.calls] == [(2, 1, 1)] * 2


def test_a_launch_that_failed_is_an_error_with_its_size(monkeypatch):
    """And the driver's own words; the next one is tried as before."""
    status = CUresult.CUDA_ERROR_INVALID_VALUE
    driver = Driver(
        cuLaunchKernelEx=[(status,), (CUresult.CUDA_SUCCESS,)], cuGetErrorString=[(CUresult.CUDA_SUCCESS, b"invalid argument")]
    )
    launcher = loaded(monkeypatch, driver)

    with pytest.raises(CudaError, match=r"cuLaunchKernelEx of grid \(7, 1, 1\), 32 threads answered .*: invalid argument"):
        launcher((7, 1, 1), 32, 0, 1, 2)
    launcher((7, 1, 1), 32, 0, 1, 2)


@pytest.mark.parametrize("features", [(), ("sinks",)])
def test_parts_are_what_all_values_at_once_are(features):
    """Byte for byte, in whatever order they are put."""
    shape = Shape(features=features)
    pointers, planned = (1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11, 12)
    tail, own = (13, 14, 15, 16, 0.5, *[b"layer" * 8] * bool(features)), (17, 18, 19, 20)
    whole, packer = (Packer(shape.signature + tensor_core.OWN_SIGNATURE) for _ in range(2))
    whole.pack(*pointers, *planned, *tail, *own)
    parts = Parts(packer.buffer, shape, own)
    for changed in ((21, 22, 23, 24, 25), pointers):
        parts.pointers[:], parts.verified[:] = parts.pack(changed, tail)
    parts.plan(*planned)

    assert f"{POINTERS} {PLANNED} {VERIFIED}".replace(" ", "") == attention.SIGNATURE.replace(" ", "")
    assert packer.buffer == whole.buffer


def test_a_thread_that_has_not_used_its_device_enters_it(monkeypatch):
    """torch may give it memory without a call of the driver; a launch then finds no context, and makes torch's its own."""
    driver = Driver(cuLaunchKernelEx=[(CUresult.CUDA_ERROR_INVALID_CONTEXT,), (CUresult.CUDA_SUCCESS,)])
    launcher = loaded(monkeypatch, driver)
    launcher((1, 1, 1), 32, 0, 1, 2)

    entered = ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert driver.calls == ["cuLaunchKernelEx", *entered, "cuLaunchKernelEx"]


def test_parameters_that_the_driver_does_not_tell_are_its_error(monkeypatch):
    """Not a kernel without parameters: whoever asks without a context is told so."""
    status = CUresult.CUDA_ERROR_INVALID_CONTEXT
    driver = Driver(cuKernelGetParamInfo=[(status, 0, 0)], cuGetErrorString=[(CUresult.CUDA_SUCCESS, b"invalid context")])
    launcher = loaded(monkeypatch, driver)

    with pytest.raises(CudaError, match="cuKernelGetParamInfo answered CUDA_ERROR_INVALID_CONTEXT: invalid context"):
        launcher._check_signature(driver, 0)


def test_a_signature_is_held_against_the_kernels(monkeypatch):
    """By the sizes that the driver tells, until it says that there are no more."""
    sizes = [(CUresult.CUDA_SUCCESS, 0, 8), (CUresult.CUDA_SUCCESS, 8, 8), (CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0)]
    driver = Driver(cuKernelGetParamInfo=sizes)

    with pytest.raises(CudaError, match=r"have \[8, 4\] bytes, the kernel's \[8, 8\]"):
        loaded(monkeypatch, driver)._check_signature(driver, 0)
