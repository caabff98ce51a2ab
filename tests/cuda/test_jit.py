"""Compiling kernels: what the cache keys, what it survives, and what an error says. No GPU is needed."""

from __future__ import annotations

import pytest

from impls.cuda import jit, toolkit

pytestmark = pytest.mark.skipif(
    toolkit.compiler_why_missing() is not None, reason=toolkit.compiler_why_missing() or "the compiler is here"
)

SOURCE = """
#include "half.cuh"
#include "more/factors.h"
extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= PA_FACTOR * kHalf * kThird; }
extern "C" __global__ void other(float* x) { x[threadIdx.x] = 1.0f; }
"""
HEADER = "constexpr float kHalf = 0.5f;"
#: Included by name, and neither beside the source nor a .cuh: as a repository of one's own has it.
DEEPER = {"more/factors.h": '#pragma once\n#include "third.inc"', "more/third.inc": "constexpr float kThird = 0.33f;"}


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A kernel with a header beside it, and a cache of its own."""
    monkeypatch.setenv("PAGEDBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "half.cuh").write_text(HEADER)
    (tmp_path / "scale.cu").write_text(SOURCE)
    (tmp_path / "more").mkdir()
    for name, text in DEEPER.items():
        (tmp_path / name).write_text(text)
    return tmp_path / "scale.cu"


def compile_scale(source, entry="scale", factor="2.0f", arch="sm_90"):
    return jit.compile(source, entry=entry, macros={"PA_FACTOR": factor}, arch=arch)


def forbid_compiling(monkeypatch):
    def compiled(request):
        raise AssertionError(f"{request.path.name} was compiled again")

    monkeypatch.setattr(jit, "_nvrtc", compiled)


def test_second_compile_takes_the_cubin_from_disk(source, monkeypatch):
    """A warm start calls no compiler and gives the same kernel."""
    first = compile_scale(source)
    forbid_compiling(monkeypatch)

    assert compile_scale(source) == first


@pytest.mark.parametrize("change", ["macro", "entry", "arch", "source", "header", "deeper", "nvrtc", "cuda_headers"])
def test_whatever_changes_the_result_changes_the_key(source, monkeypatch, change):
    """A cached kernel is never taken for another one."""
    compile_scale(source)
    forbid_compiling(monkeypatch)
    if change == "source":
        source.write_text(SOURCE.replace("*=", "+="))
    if change == "header":
        (source.parent / "half.cuh").write_text(HEADER.replace("0.5f", "0.25f"))
    if change == "deeper":
        (source.parent / "more" / "third.inc").write_text("constexpr float kThird = 0.25f;")
    if change == "nvrtc":
        monkeypatch.setattr(toolkit, "nvrtc_version", lambda: "99.0")
    if change == "cuda_headers":
        monkeypatch.setattr(toolkit, "header_digest", lambda: "0" * 64)
    changed = {"macro": {"factor": "3.0f"}, "entry": {"entry": "other"}, "arch": {"arch": "sm_80"}}.get(change, {})

    with pytest.raises(AssertionError, match="compiled again"):
        compile_scale(source, **changed)


@pytest.mark.parametrize("suffix", [".cubin", ".json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "foreign"])
def test_damaged_cache_entry_is_compiled_again(source, tmp_path, suffix, damage):
    """Half-written, lost or foreign files in the cache never reach the GPU."""
    first = compile_scale(source)
    (file,) = (tmp_path / "cache").glob(f"*{suffix}")
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "cut" else b'{"digest": 0}')

    assert compile_scale(source) == first
    assert file.read_bytes() == content


def test_cache_that_cannot_be_written_is_said(source, tmp_path, monkeypatch):
    """The kernel still compiles, with a warning that names the remedy."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEDBENCH_CACHE", str(tmp_path / "file"))

    with pytest.warns(UserWarning, match="set PAGEDBENCH_CACHE"):
        assert compile_scale(source).cubin


def test_compile_error_shows_our_file_and_line(source):
    """File, line, architecture, NVRTC and macros; no folder of this machine."""
    with pytest.raises(jit.CompileError) as caught:
        compile_scale(source, factor="two", arch="sm_80")

    text = str(caught.value)
    assert text.startswith(f"scale.cu, sm_80, NVRTC {toolkit.nvrtc_version()}, PA_FACTOR=two\n")
    assert 'scale.cu(4): error: identifier "two" is undefined' in text
    assert str(source.parent) not in text


def test_error_in_a_header_is_shown_by_the_headers_name(source):
    """A header's lines are its own, without the folder."""
    (source.parent / "half.cuh").write_text("constexpr int kHalf = nothing;")
    with pytest.raises(jit.CompileError, match=r"\n  half.cuh\(1\): error"):
        compile_scale(source)


def test_entry_that_is_not_there_is_an_error(source):
    """A misspelt entry is told at compile time, not at launch."""
    with pytest.raises(jit.CompileError, match="scales, sm_90: no extern"):
        compile_scale(source, entry="scales")


def test_resources_are_of_the_entry_asked_for():
    """Registers, static shared memory, stack and spills are read from ptxas, for the right one of several kernels."""
    log = """
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in the function 'first'
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas         .     48 bytes stack frame, 20 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 4096 bytes smem
"""
    assert jit.parse_resources(log, "second", "sm_90") == {
        "name": "second", "arch": "sm_90", "registers": 255, "shared_bytes": 4096, "stack_bytes": 48, "spill_bytes": 36,
        "losses": [],
    }
    assert jit.parse_resources(log, "first", "sm_90")["losses"] == ["wgmma.mma_async instructions are serialized"]
    assert jit.parse_resources(log, "first", "sm_90")["shared_bytes"] == 0


def test_compile_needs_a_target(source):
    """Neither device nor architecture is wrong usage, and a kernel without device cannot be launched."""
    with pytest.raises(ValueError, match="give device or arch"):
        jit.compile(source, entry="scale")
    with pytest.raises(ValueError, match="compiled without a device"):
        compile_scale(source).launcher("P")


def test_missing_headers_are_told_with_the_places_tried(tmp_path, monkeypatch):
    """The reason says where was looked and what to install."""
    monkeypatch.setattr(toolkit, "header_candidates", lambda: [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(toolkit.ToolkitMissing, match=r"cuda_fp16\.h.*a, .*b; install nvidia-cuda-runtime"):
        toolkit.header_folder.__wrapped__()
