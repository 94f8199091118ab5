"""What a server must be for this plugin: checked once, at start, with the reason when it is not."""

from __future__ import annotations

from dataclasses import dataclass


class UnsupportedError(RuntimeError):
    """The server's configuration cannot run this backend; the message says why and what to change."""


@dataclass(frozen=True)
class Configuration:
    """The facts of a server that decide."""

    device: str  # cpu | cuda
    is_mla: bool
    dtype: str  # of the model: float32 | bfloat16 | float16
    kv_dtype: str  # of the KV pool
    page_size: int
    heads: int  # of this rank
    latent_dim: int
    rope_dim: int
    sliding_window: int | None = None
    logit_cap: float = 0.0
    deterministic: bool = False
    context_parallel: int = 1
    architecture: str = ""  # model class, for the message


def unsupported(configuration: Configuration, dtypes: tuple[str, ...]) -> str:
    """Why this server cannot use the backend, or "".

    Args:
        configuration: of the server.
        dtypes: KV types the kernels of this device take.
    """
    c = configuration
    if not c.is_mla:
        return f"{c.architecture or 'the model'} has no multi-head latent attention; verify_attn serves MLA models only"
    if c.kv_dtype not in dtypes:
        return f"the KV cache is {c.kv_dtype}; the {c.device} kernels take {', '.join(dtypes)} (see --kv-cache-dtype)"
    if c.kv_dtype != c.dtype:
        return f"the model is {c.dtype} but its KV cache {c.kv_dtype}; they must be the same (see --kv-cache-dtype)"
    if c.device == "cuda" and (c.latent_dim, c.rope_dim) != (512, 64):
        return f"latent {c.latent_dim} and rope {c.rope_dim}: the CUDA kernels take 512 and 64 (DeepSeek V2/V3, Kimi K2)"
    if not 1 <= c.page_size <= 256 or c.page_size & (c.page_size - 1):
        return f"page size {c.page_size}: give a power of two up to 256 (see --page-size)"
    if c.sliding_window is not None and c.sliding_window > 0:
        return f"sliding window attention ({c.sliding_window}) has no tree-verify kernel here"
    if c.logit_cap:
        return f"logits are capped at {c.logit_cap}; the kernels do not cap"
    if c.deterministic:
        return "--enable-deterministic-inference uses SGLang's unified kernel, which this backend does not replace"
    if c.context_parallel > 1:
        return f"decode context parallelism of {c.context_parallel} shards the prefix; the kernels need all of it"
    return ""


def require(configuration: Configuration, dtypes: tuple[str, ...]) -> None:
    """Raise UnsupportedError with the reason; the scheduler then ends and the server with it."""
    reason = unsupported(configuration, dtypes)
    if reason:
        raise UnsupportedError(f"verify_attn cannot serve this: {reason}.")


def read_configuration(runner) -> Configuration:
    """The configuration of an SGLang ModelRunner."""
    from sglang.srt.runtime_context import get_exec, get_parallel

    model = runner.model_config
    text = model.hf_text_config
    parallel = get_parallel()
    is_mla = bool(runner.use_mla_backend)
    return Configuration(
        device=str(runner.device).split(":")[0],
        is_mla=is_mla,
        dtype=_name(runner.dtype),
        kv_dtype=_name(runner.kv_cache_dtype),
        page_size=runner.page_size or 1,
        heads=model.num_attention_heads // parallel.attn_tp_size,
        latent_dim=model.kv_lora_rank if is_mla else 0,
        rope_dim=model.qk_rope_head_dim if is_mla else 0,
        sliding_window=runner.sliding_window_size,
        logit_cap=float(getattr(text, "attn_logit_softcapping", None) or 0.0),
        deterministic=bool(get_exec().deterministic.enable_deterministic_inference),
        context_parallel=parallel.attn_dcp_size,
        architecture=(model.hf_config.architectures or [""])[0],
    )


def _name(dtype) -> str:
    return str(dtype).removeprefix("torch.")
