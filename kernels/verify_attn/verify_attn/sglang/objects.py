"""Which compiled object a server uses: inside a release only the release's own."""

from __future__ import annotations

import os
from pathlib import Path

from verify_attn import build
from verify_attn.build import Built
from verify_attn.errors import KernelBuildError

BUNDLE = "VERIFY_ATTN_PREBUILT"


def from_release(built: Built) -> Built:
    """The object, if it may be used here.

    A server that runs a release ($VERIFY_ATTN_PREBUILT names its objects) must not compile one of its own at start: what
    it would serve is then not what was proved.

    Raises:
        KernelBuildError: the release has no object made from its sources for this machine.
    """
    bundle = os.environ.get(BUNDLE)
    if bundle and not Path(built.path).resolve().is_relative_to(Path(bundle).resolve()):
        raise KernelBuildError(
            f"the release's objects in {bundle} hold none of {built.library} that was made from its sources for this "
            f"machine ({', '.join(built.archs)}); build the release for it"
        )
    return built


def cuda_object(variant: str, device) -> Built:
    """The object that `verify_attn.cuda` runs a variant from on that device (a torch.device)."""
    from verify_attn import cuda

    library = cuda.variants()[variant]
    arch = cuda.arch_for(library, device)
    given = os.environ.get(cuda.OBJECTS)
    found = build.prebuilt(library.name, arch, Path(given)) if given else build.build(library.name, (arch,))
    if not found:
        raise KernelBuildError(f"{given} holds no object of {library.name} for {arch} made from these sources")
    return found
