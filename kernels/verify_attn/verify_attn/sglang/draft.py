"""The draft model's attention: SGLang picks it from a closed list of backend names, which ours joins by a hook.

On CUDA it is SGLang's own Triton draft attention; on the CPU the plain torch one.
"""

from __future__ import annotations

from verify_attn.sglang import offered

FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory."
REFUSAL = "verify_attn has no draft attention for {backend_type}"


def hook_factory() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(FACTORY + "create_decode_backend", _decode, HookType.AROUND)
    HookRegistry.register(FACTORY + "create_draft_extend_backend", _extend, HookType.AROUND)


def _decode(original, factory):
    """Attention of the draft steps: a container of one backend a step."""
    name = _ours(factory)
    if not name:
        return original(factory)
    if factory.speculative_num_steps <= 1:
        return None

    def make():
        if _on_cuda():
            return factory._create_triton_decode_backend()
        from verify_attn.sglang.torch_backend import TorchDraftDecode

        runner = factory.draft_model_runner
        return name, TorchDraftDecode(runner, name, factory.topk, factory.speculative_num_steps)

    return factory._create_backend("decode_attention_backend", {name: make}, REFUSAL, stamps_children=True)


def _extend(original, factory):
    """Attention of the draft's catch-up on accepted tokens."""
    name = _ours(factory)
    if not name:
        return original(factory)

    def make():
        if _on_cuda():
            return factory._create_triton_prefill_backend()
        from verify_attn.sglang.torch_backend import TorchBackend

        return name, TorchBackend(factory.draft_model_runner, name, announces=False)

    return factory._create_backend("decode_attention_backend", {name: make}, REFUSAL)


def _ours(factory) -> str:
    """Our name when the draft is to use it, else ""."""
    from sglang.srt.runtime_context import attention_backends

    name = factory.draft_attn_backend or attention_backends()[1]
    return name if name in offered else ""


def _on_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
