"""Deliberately bad variants of `verify_attn`'s CPU backend, for demonstrations and tests of rollouts. Never for production.

Entry point group `sglang.srt.plugins`, beside `verify_attn`'s own plugin. README.md says what each backend does wrong.

Environment:
    VERIFY_ATTN_FAULTS_WHEN    when the fault shows, see `trigger`
    VERIFY_ATTN_FAULTS_REPEAT  `verify_attn_slow`: times the attention is done
    VERIFY_ATTN_FAULTS_BLOCK   `verify_attn_wrong`: keys in a block
    VERIFY_ATTN_FAULTS_PEERS   directory where workers count each other
"""

from __future__ import annotations

SLOW, WRONG, CRASH = "verify_attn_slow", "verify_attn_wrong", "verify_attn_crash"


def activate() -> None:
    """Offer the backends to SGLang; imports no kernel, since the launcher process runs it too."""
    from verify_attn.sglang import offer

    for name in (SLOW, WRONG, CRASH):
        offer(name, _create)


def _create(name: str, runner):
    """The spoilt backend of one target model; a draft model gets the usual one."""
    import torch
    from verify_attn.sglang.create import CPU_DTYPES, create_backend
    from verify_attn.sglang.requirements import UnsupportedError, read_configuration, require

    from verify_attn_faults import backends

    if torch.cuda.is_available():
        raise UnsupportedError(f"{name} spoils the CPU backend only; it shows nothing on CUDA.")
    if runner.is_draft_worker:
        return create_backend(name, runner)
    require(read_configuration(runner), CPU_DTYPES)
    return backends.KINDS[name](runner, name)
