"""Models of other shapes than the embedded environment's own, made once by the same generator into the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from phases.base.errors import ServingError
from phases.engines.embedded.provision import HERE, ServingEnvironment, cache_directory
from phases.playbook.located import Mistakes, Node
from phases.playbook.typed import setting

GENERATOR = HERE / "make_model.py"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a small MLA model with random weights; head sizes stay DeepSeek V3's (latent 512, rope 64)."""

    heads: int = setting(8, at_least=1, at_most=128, help="attention heads in all; tensor parallelism shares them out")
    layers: int = setting(3, at_least=2, at_most=16, help="layers; its draft model has one less")
    hidden: int = setting(128, at_least=32, at_most=1024, help="width")

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if self.hidden % 32:
            mistakes.add(node.get("hidden") or node, f"{node.path}: hidden must be a multiple of 32, not {self.hidden}")


def ensure_model(environment: ServingEnvironment, shape: ModelShape, progress: Callable[[str], None]) -> Path:
    """Directory with `target` and `draft`, made now if it is not there; a killed making leaves nothing under its name.

    Raises:
        ServingError: the generator failed.
    """
    sizes = [part for name, value in asdict(shape).items() for part in (f"--{name}", str(value))]
    key = hashlib.sha256(GENERATOR.read_bytes() + "\0".join(sizes).encode()).hexdigest()[:16]
    final = cache_directory() / "models" / key
    if final.exists():
        return final
    progress(f"making a model of {shape.heads} heads, {shape.layers} layers, width {shape.hidden}")
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{key}.partial-", dir=final.parent))
    argv = [str(environment.python), str(GENERATOR), str(partial), *sizes]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(partial)
        tail = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise ServingError(
            f"the model cannot be made (exit {done.returncode}):\n{tail}\n", hint="Correct `embedded_fleet.model`."
        )
    try:
        os.rename(partial, final)
    except OSError:  # another process was faster; the same sizes give the same bytes
        shutil.rmtree(partial)
    return final
