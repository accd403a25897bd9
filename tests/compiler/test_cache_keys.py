"""What JAX's persistent compilation cache looks programs up by, as the guide of `serving compile` says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

WRITTEN = """
import sys, jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

@jax.jit
def doubled(x):
    return 2 * x

doubled(jnp.ones(3))
"""


def entry(folder: Path, **variables: str) -> str:
    """The name under which a process keeps a program in a folder."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "true"} | variables
    subprocess.run([sys.executable, "-c", WRITTEN, str(folder)], env=environment, check=True, timeout=300)
    (kept,) = folder.glob("jit_doubled-*-cache")
    return kept.name


def test_a_program_s_key_holds_its_folder_unless_xla_keeps_no_cache_of_its_own(tmp_path: Path) -> None:
    none = {"JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none"}
    assert entry(tmp_path / "a") != entry(tmp_path / "b")
    assert entry(tmp_path / "c", **none) == entry(tmp_path / "d", **none)


def test_xla_s_flags_count_in_any_order_and_in_either_variable(tmp_path: Path) -> None:
    def kept(folder: str, **flags: str) -> str:
        none = {"JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none", "XLA_FLAGS": "", "LIBTPU_INIT_ARGS": ""}
        return entry(tmp_path / folder, **none | flags)

    first, second = "--xla_cpu_max_isa=AVX2", "--xla_cpu_enable_fast_min_max=true"
    both = kept("both", XLA_FLAGS=f"{first} {second}")
    assert both == kept("parted", LIBTPU_INIT_ARGS=second, XLA_FLAGS=first)
    assert both != kept("without")
