"""How many bytes one token's keys and values take, by model."""

from dataclasses import dataclass

from runtime.tokens import as_integer


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """What of a model decides the size of its cache.

    num_values    2 for keys and values; 1 where a latent stands for both
    head_dim      elements of one head of one of them
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_values: int = 2
    element_bytes: int = 2  # float16 or bfloat16

    def __post_init__(self) -> None:
        for rule in ("num_layers", "num_kv_heads", "head_dim", "num_values", "element_bytes"):
            as_integer(getattr(self, rule), f"KVShape {self.name}: {rule}", 1)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers together."""
        return self.num_layers * self.num_values * self.num_kv_heads * self.head_dim * self.element_bytes


MODELS = (
    KVShape(name="LLaMA-7B", num_layers=32, num_kv_heads=32, head_dim=128),
    KVShape(name="LLaMA-13B", num_layers=40, num_kv_heads=40, head_dim=128),
    KVShape(name="Llama-2-70B", num_layers=80, num_kv_heads=8, head_dim=128),
    KVShape(name="Llama-3-8B", num_layers=32, num_kv_heads=8, head_dim=128),
    KVShape(name="Mistral-7B", num_layers=32, num_kv_heads=8, head_dim=128),
    KVShape(name="Qwen2.5-7B", num_layers=28, num_kv_heads=4, head_dim=128),
    KVShape(name="Qwen3-0.6B", num_layers=28, num_kv_heads=8, head_dim=128),
    KVShape(name="Qwen3-8B", num_layers=36, num_kv_heads=8, head_dim=128),
    KVShape(name="DeepSeek-V3 (latent)", num_layers=61, num_kv_heads=1, head_dim=576, num_values=1),
)
