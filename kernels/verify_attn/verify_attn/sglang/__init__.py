"""The SGLang plugin: attention backend `verify_attn`, entry point group `sglang.srt.plugins`.

Tree verify of speculative decoding runs our kernel; everything else is the engine's own attention: SGLang's Triton backend
on CUDA, a plain torch one on the CPU (where SGLang has no backend that can verify a tree on an MLA model). On the CPU that
torch backend is also offered alone, as `verify_attn_torch`: the incumbent a candidate is compared with there.

SGLang calls `activate` in every process of a server: before the command line is parsed in the launcher, again in each
scheduler. It only logs a plugin that fails, and then serves on without it, so the backend announces itself where the
toolkit can check: a log line, a fact file per rank (`facts`), `/server_info` and `/metrics`.

Environment:
    VERIFY_ATTN_FACTS    directory for the fact files
    VERIFY_ATTN_RELEASE  digest of the release this server runs, repeated in the facts
    VERIFY_ATTN_CONTROL  file whose first byte says which kernel runs; looked at by every forward, see `control`
    VERIFY_ATTN_HOT      how that byte reaches captured graphs: candidate, both or off; see `graphs`
    VERIFY_ATTN_SHADOW   share of verify steps on which both kernels run and are compared; see `shadow`
"""

from __future__ import annotations

NAME = "verify_attn"
TORCH_NAME = "verify_attn_torch"  # CPU only
offered: set[str] = set()  # names whose draft models get our draft attention


def activate() -> None:
    """Register the backends, their draft twins and what they publish. Imports no CUDA: the launcher process runs it too."""
    import torch

    from verify_attn.sglang import draft, publish

    on_cuda = torch.cuda.is_available()
    for name in [NAME] if on_cuda else [NAME, TORCH_NAME]:
        offer(name)
    draft.hook_factory()
    publish.hook_server_info()
    if on_cuda:
        from verify_attn.sglang import graphs

        graphs.hook()
    else:
        _keep_triton_out()
        # SGLang's draft workers synchronise the device without asking whether there is one.
        torch.cuda.synchronize = lambda device=None: None


def offer(name: str, create=None) -> None:
    """Let the command line take a backend's name and make it by `create(name, runner)`; default: this package's own.

    Also for plugins that build upon these backends: draft models under their names get the same draft attention.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if name not in choices.ATTENTION_BACKEND_CHOICES:  # the lists are read when the parser is built, which comes after this
        choices.add_attention_backend_choices([name])
        choices.add_draft_attention_backend_choices([name])
    offered.add(name)

    @register_attention_backend(name)
    def make(runner):
        if create is not None:
            return create(name, runner)
        from verify_attn.sglang.create import create_backend

        return create_backend(name, runner)


def _keep_triton_out() -> None:
    """With pages SGLang looks up a request's last slot by a Triton kernel, unless the backend has one of two names; it brings
    the same in plain torch, which is what a CPU can run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def last_slots(req_to_token, requests, lengths):
        from sglang.srt.mem_cache.allocation import get_last_loc_torch

        return get_last_loc_torch(req_to_token, requests, lengths)

    HookRegistry.register("sglang.srt.mem_cache.allocation.get_last_loc_triton", last_slots, HookType.REPLACE)
