"""Build the model states that the benchmarks share."""

from __future__ import annotations


def gpt2_small_shapes() -> dict[str, tuple[int, ...]]:
    """Parameter shapes of GPT-2 small (124 M values; tied output embedding), by name."""
    width, layers, vocabulary, context = 768, 12, 50257, 1024
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, width), "wpe.weight": (context, width)}
    for i in range(layers):
        block = f"h.{i}"
        shapes |= {
            f"{block}.ln_1.weight": (width,),
            f"{block}.ln_1.bias": (width,),
            f"{block}.attn.c_attn.weight": (3 * width, width),
            f"{block}.attn.c_attn.bias": (3 * width,),
            f"{block}.attn.c_proj.weight": (width, width),
            f"{block}.attn.c_proj.bias": (width,),
            f"{block}.ln_2.weight": (width,),
            f"{block}.ln_2.bias": (width,),
            f"{block}.mlp.c_fc.weight": (4 * width, width),
            f"{block}.mlp.c_fc.bias": (4 * width,),
            f"{block}.mlp.c_proj.weight": (width, 4 * width),
            f"{block}.mlp.c_proj.bias": (width,),
        }
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}
