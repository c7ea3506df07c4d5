"""Provide layouts for tests: that of a model, and any that hypothesis draws."""

from __future__ import annotations

from hypothesis import strategies as st

from scarctl.state.layout import DTYPES, Group, Layout, TensorSpec

SLOTS = ("", "exp_avg", "exp_avg_sq")


def group(name: str, *shape: int, rows: int = 1, slots: tuple[str, ...] = SLOTS, dtype: str = "F32") -> Group:
    return Group(name, "parameter", rows, tuple(TensorSpec(slot, dtype, shape) for slot in slots))


def model() -> Layout:
    """Return the layout of an embedding, a module of two layers, a scalar, an empty tensor and a buffer."""
    return Layout(
        [
            group("emb.weight", 10, 4, rows=3),
            group("layers.0.weight", 6, 2, rows=2),
            group("layers.0.bias", 6, rows=6),
            group("scale", rows=1),
            group("empty", 0, 4, rows=1),
            Group("mean", "buffer", 6, (TensorSpec("", "F64", (6,)),)),
        ],
        optimizer="AdamW",
    )


shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    names = draw(st.lists(st.text("ab.[*]0:é", min_size=1, max_size=6), unique=True, max_size=6))
    result = []
    for name in names:
        shape = draw(shapes)
        slots = ("", *draw(st.lists(st.sampled_from(["m", "v", "master"]), unique=True)))
        specs = [TensorSpec(slot, draw(st.sampled_from(sorted(DTYPES))), shape) for slot in slots]
        kind = draw(st.sampled_from(["parameter", "buffer"]))
        result.append(Group(name, kind, draw(st.integers(1, 14)), tuple(specs)))
    return result


layouts = st.builds(Layout, groups(), st.sampled_from(["", "SGD", "AdamW+SGD"]))


def rows(count: int) -> Layout:
    return Layout([group("t", count, slots=("",), dtype="U8")])
