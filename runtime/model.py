"""Qwen3, dense or mixture of experts: transformers' own modules, whose attention goes to a paged cache.

A model comes from a local folder of a checkpoint, or with random weights from a config, ours by name or a config.json.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from harness.device import find_device
from harness.names import UsageError, nearest
from harness.ops.dtypes import torch_dtype
from harness.words import of_error
from runtime.attention import NAME, register
from runtime.configs import CONFIGS, DTYPES
from runtime.fusing import fuse_norms, fuse_projections

OLDEST = (5, 17)
SUPPORTED = ("qwen3", "qwen3_moe")


class UnsupportedModel(UsageError):
    """A model that this engine cannot serve; said at load."""


def why_no_transformers() -> str | None:
    """Return why transformers cannot be used here, or None."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install 'pagedbench[runtime]'"
    version = importlib.import_module("transformers").__version__
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        return f"transformers must be at least {'.'.join(map(str, OLDEST))} (got {version})"
    return None


def transformers() -> ModuleType:
    """The library. Raises UsageError where it is missing or too old."""
    reason = why_no_transformers()
    if reason:
        raise UsageError(reason)
    return importlib.import_module("transformers")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A causal language model whose attention is ours.

    name      the folder, or the config's name
    module    transformers' ...ForCausalLM, in evaluation mode, on `device`
    dtype     "f32", "f16" or "bf16"
    eos       token ids that end a sequence
    """

    name: str
    module: Any
    dtype: str
    device: str
    eos: frozenset[int]

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_model_len(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def num_parameters(self) -> int:
        """Of all weights; shared ones once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.module.parameters())

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, handle: int) -> torch.Tensor:
        """Last hidden states [num_tokens, hidden_size] of packed tokens; `handle` says where their attention goes."""
        positions = positions.clone()[None]  # a compiler looks at where in a buffer a view begins, and compiles anew
        found = self.module.model(
            input_ids=tokens[None], position_ids=positions, attention_mask=None, use_cache=False, paged_handle=handle
        )
        states: torch.Tensor = found.last_hidden_state[0]
        return states

    def compile(self, what: str, backend: str = "inductor") -> None:
        """Compile the decoder "layer", which is one graph for all of them, or the whole "model"; any number of tokens.

        Nothing falls back to eager: a graph that breaks, or is compiled too often, is an error when it is first run.
        """
        targets = [self.module.model] if what == "model" else self.module.model.layers
        for target in targets:
            target.compile(fullgraph=True, dynamic=True, backend=backend)

    def uncompile(self) -> None:
        """Run eagerly again."""
        for target in (self.module.model, *self.module.model.layers):
            target._compiled_call_impl = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size] of chosen hidden states."""
        found: torch.Tensor = self.module.lm_head(hidden)
        return found


def load(name: str, *, dtype: str = "bf16", device: str = "cpu", seed: int = 0, fuse: bool = True) -> Model:
    """Load a checkpoint's folder, or make a model of random weights from one of CONFIGS or a config.json.

    fuse    whether projections of the same input become one product, and norms torch's own, which are one kernel
    Raises UnsupportedModel, or UsageError for a dtype or device that is none or not there, and where transformers is missing.
    """
    if dtype not in DTYPES:
        raise UsageError(f"--dtype must be one of {', '.join(DTYPES)} (got {dtype!r})")
    if not isinstance(device, str):
        raise UsageError(f"--device must be cpu, cuda or cuda:INDEX (got {device!r})")
    find_device(device)
    if device == "cuda":  # the current one, whichever will be so later
        device = f"cuda:{torch.cuda.current_device()}"
    library = transformers()
    folder = Path(name)
    if name in CONFIGS:
        config = _config(library, CONFIGS[name])
    elif folder.is_dir() and (folder / "config.json").is_file():
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True)
    elif folder.is_file() and folder.suffix == ".json":
        config = _config(library, _read(folder))
    else:
        raise UnsupportedModel(
            f"--model {name}: no folder with a config.json, no .json file and none of {', '.join(CONFIGS)}"
            f"{nearest(name, CONFIGS)}"
        )
    why = why_unsupported(config)
    if why:
        raise UnsupportedModel(f"--model {name}: {why}")
    register(library)
    try:
        module = _make(library, config, folder if folder.is_dir() else None, dtype, device, seed)
    except (torch.OutOfMemoryError, UnsupportedModel):
        raise
    except (RuntimeError, ValueError, OSError, _safetensors_error()) as error:
        raise UnsupportedModel(f"--model {name}: transformers cannot make it: {of_error(error)}") from error
    if fuse:
        fuse_norms(module.model, config.rms_norm_eps)
        for layer in module.model.layers:
            fuse_projections(layer)
    return Model(name=name, module=module, dtype=dtype, device=device, eos=_eos(module))


def why_unsupported(config: Any) -> str | None:
    """Return why a config's attention cannot be served, or None."""
    kind = getattr(config, "model_type", None)
    if kind not in SUPPORTED:
        return f"model_type must be one of {', '.join(SUPPORTED)} (got {kind!r})"
    if getattr(config, "sliding_window", None) is not None:
        return f"sliding windows are not supported (got sliding_window {config.sliding_window})"
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if not shared or heads % shared:
        return f"num_attention_heads must be a multiple of num_key_value_heads (got {heads}, {shared})"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        return f"rotary embeddings must not depend on the longest sequence of a batch (got rope_type {rope!r})"
    return None


def _config(library: ModuleType, fields: Mapping[str, Any]) -> Any:
    kind = fields.get("model_type")
    if kind not in SUPPORTED:
        raise UnsupportedModel(f"model_type must be one of {', '.join(SUPPORTED)} (got {kind!r})")
    rest = {name: value for name, value in fields.items() if name != "model_type"}
    if "rope_theta" in rest and "rope_parameters" not in rest:
        rest["rope_parameters"] = {"rope_type": "default", "rope_theta": rest.pop("rope_theta")}
    return library.AutoConfig.for_model(kind, **rest)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UnsupportedModel(f"{path}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{path}: must hold an object (got {type(found).__name__})")
    return found


def _make(library: ModuleType, config: Any, folder: Path | None, dtype: str, device: str, seed: int) -> Any:
    auto, wanted = library.AutoModelForCausalLM, torch_dtype(dtype)
    if folder is not None and any(folder.glob("*.safetensors")):
        module, loaded = auto.from_pretrained(
            folder, dtype=wanted, attn_implementation=NAME, local_files_only=True, output_loading_info=True
        )
        missing = sorted(loaded["missing_keys"])  # transformers goes on with random ones
        if missing:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise UnsupportedModel(f"--model {folder}: its .safetensors lack {missing[0]}{more}")
        module = module.to(device)
    elif folder is not None:
        raise UnsupportedModel(f"--model {folder}: has no .safetensors; name its config.json for random weights")
    else:
        place = torch.device(device)
        with torch.random.fork_rng([place] if place.type == "cuda" else []), place:
            torch.manual_seed(seed)
            module = auto.from_config(config, dtype=wanted, attn_implementation=NAME).to(place)
    module.eval().requires_grad_(False)
    return module


def _safetensors_error() -> type[Exception]:
    """What a damaged file of weights raises."""
    found: type[Exception] = importlib.import_module("safetensors").SafetensorError
    return found


def _eos(module: Any) -> frozenset[int]:
    """Of the generation config, as generate() has it, else of the config."""
    found = getattr(module.generation_config, "eos_token_id", None)
    found = module.config.eos_token_id if found is None else found
    return frozenset([found] if isinstance(found, int) else found or ())
