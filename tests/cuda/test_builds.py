"""Every kernel's default builds, compiled for four architectures without a GPU."""

from __future__ import annotations

import pytest

from impls.cuda import builds, toolkit

pytestmark = pytest.mark.skipif(
    toolkit.compiler_why_missing() is not None, reason=toolkit.compiler_why_missing() or "the compiler is here"
)


@pytest.mark.parametrize("arch", builds.ARCHS)
def test_default_builds_fit(arch):
    """No spills, no stack, no product that waits, and shared memory as a CTA gets it: 48 KB unasked, else the limit."""
    found = builds.resources(arch)
    waits = [one["build"] for one in found if one.get("losses")]
    spilt = [one["build"] for one in found if one["spill_bytes"] or one["stack_bytes"]]
    too_large = [
        one["build"] for one in found
        if one["shared_bytes"] > 48 * 1024 or one["shared_bytes"] + one["dynamic_bytes"] > one["shared_limit_bytes"]
    ]

    assert not spilt
    assert not waits
    assert not too_large


def test_every_kernel_source_has_a_build():
    """A .cu that no page lists would never be compiled without a GPU."""
    from impls.cuda.jit import FOLDER

    listed = {build.source for build in builds.builds("sm_90")}
    assert listed == {file.name for file in FOLDER.glob("*.cu")}
