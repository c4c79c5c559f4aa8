"""Attention over a prefix tree against torch's attention with the dense mask, from which it must not differ."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AutoModelForCausalLM

from lightning_agentrl.models import prefix_tree
from lightning_agentrl.models.attention import flash
from lightning_agentrl.models.attention import tree as attention_tree
from lightning_agentrl.models.attention.tree import flex_options, no_mask, tree_attention_forward
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.packing import pack
from lightning_agentrl.models.prefix_tree import PrefixTree, lay_out
from tests.inputs import text_row
from tests.tiny import tiny_model_folder

MODULE = SimpleNamespace(num_key_value_groups=2, training=True)


def random_tree(seed: int, rows: int, longest: int) -> PrefixTree:
    """Rows that branch off from each other anywhere."""
    draw = random.Random(seed)
    made: list[tuple[int, ...]] = []
    for k in range(rows):
        start = draw.choice(made)[: draw.randrange(longest)] if made and draw.random() < 0.8 else ()
        made.append((*start, *(10 * j + k for j in range(draw.randint(1, longest)))))
    return lay_out(made).tree


def with_images(tree: PrefixTree) -> PrefixTree:
    """The same, but that tokens 2 to 8 of each branch, or fewer, see each other both ways."""
    starts = torch.arange(len(tree.ends))
    for span in tree._spans:
        starts[span.start + 2 : min(span.start + 8, span.stop)] = span.start + 2
    return replace(tree, starts=starts)


def qkv(tree: PrefixTree, seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, 4, len(tree.ends), 8), (1, 2, len(tree.ends), 8), (1, 2, len(tree.ends), 8)]
    return [torch.randn(s, generator=generator, dtype=dtype, requires_grad=True) for s in shapes]


def dense(x: list[torch.Tensor], mask: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = x
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


@pytest.mark.parametrize("tiled_depth", [0, attention_tree.TILED_DEPTH])
@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 40), st.sampled_from([None, 3]))
def test_equals_dense_attention(tiled_depth, seed, rows, longest, window):
    """By a call for each branch, and in tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_tree, "TILED_DEPTH", tiled_depth)
        compare_with_dense_attention(seed, rows, longest, window)


def compare_with_dense_attention(seed: int, rows: int, longest: int, window: int | None) -> None:
    tree = random_tree(seed, rows, longest)
    ours, theirs = qkv(tree, seed), qkv(tree, seed)
    out, _ = tree_attention_forward(MODULE, *ours, None, scaling=0.3, tree=tree, sliding_window=window)
    expected = dense(theirs, tree.mask(window), 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-11)


def softmax_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Attention [1, N, H, D] in which the softmax of each head has one score more, by the definition."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (0.3 * q @ k.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
    shares = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1).softmax(-1)
    return (shares[..., :-1] @ v).transpose(1, 2)


@pytest.mark.parametrize(
    ("how", "width"),
    [("levels", 8), *((how, width) for how in ("tiles", "branches", "dense", "no tree") for width in (8, 5, 11))],
)
def test_sinks_and_values_of_any_width(how, width, monkeypatch):
    """Outputs and the gradients of queries, keys, values and sinks, in each of the kernels."""
    monkeypatch.setattr(attention_tree, "TILED_DEPTH", 99 if how == "tiles" else 0)
    for name in ("flash_rows", "flash_rows_backward"):
        monkeypatch.setattr(flash, name, {"flash_rows": rows_one_by_one}.get(name, rows_one_by_one_backward))
    tree = random_tree(3, 7, 20)
    window = 4 if how == "dense" else None
    generator = torch.Generator().manual_seed(2)
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)
    values = torch.randn(1, 2, len(tree.ends), width, generator=generator, dtype=torch.float64)
    ours, theirs = ([x.detach().clone().requires_grad_() for x in (*qkv(tree, 0)[:2], values, sinks)] for _ in range(2))
    mask = tree.mask(window)
    if how == "levels":
        rows = (x[0].transpose(0, 1) for x in ours[:3])
        out = flash.LevelledAttention.apply(*rows, ours[3], tree.levels, 0.3)[None]
    else:
        given = {"tree": tree, "sliding_window": window} if how != "no tree" else {}
        seen = None if how != "no tree" else mask[None, None]
        out, _ = tree_attention_forward(MODULE, *ours[:3], seen, scaling=0.3, s_aux=ours[3], **given)
    expected = softmax_with_sinks(*theirs[:3], mask, theirs[3])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 60), st.integers(0, 5))
def test_tiles_show_what_the_tree_shows(seed, rows, longest, past):
    tree = random_tree(seed, rows, longest)
    tiles = tree.tiles(past)
    shown = torch.zeros(len(tiles.keys) * tiles.bias.shape[2], past + len(tree.ends))
    seen = (tiles.bias[:, 0] == 0).float()
    assert seen.any(-1).all()  # of no key at all there is no softmax
    for tile, keys in enumerate(tiles.keys):  # each key once at most
        shown[tile * seen.shape[1] : (tile + 1) * seen.shape[1]].index_add_(1, keys, seen[tile])
    assert torch.equal(shown[: len(tree.ends)], tree.mask(past=past).float())


@pytest.mark.parametrize("past", [0, 5])
def test_a_common_past_is_seen_by_all(past):
    """As keys before those of the tree; both ways of computing it."""
    tree = random_tree(1, 9, 30)
    q, _, _ = (x.detach() for x in qkv(tree, 0))
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(1, 2, past + len(tree.ends), 8, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = dense([q, k, v], tree.mask(past=past), 0.3)
    for tiled_depth in (0, attention_tree.TILED_DEPTH):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_tree, "TILED_DEPTH", tiled_depth)
            out, _ = tree_attention_forward(MODULE, q, k, v, None, scaling=0.3, tree=tree)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_gradients_behind_a_past_are_refused(monkeypatch):
    monkeypatch.setattr(attention_tree, "TILED_DEPTH", 0)
    tree = random_tree(1, 3, 20)
    q, k, v = qkv(tree, 0)
    out, _ = tree_attention_forward(MODULE, q[:, :, 2:], k, v, None, tree=lay_out([tuple(range(q.shape[2] - 2))]).tree)
    with pytest.raises(NotImplementedError, match="a past has no gradients"):
        out.sum().backward()


@pytest.mark.parametrize("tiled_depth", [0, attention_tree.TILED_DEPTH])
def test_scores_are_scaled_by_the_width_of_a_head_where_a_model_says_nothing(monkeypatch, tiled_depth):
    monkeypatch.setattr(attention_tree, "TILED_DEPTH", tiled_depth)
    tree = random_tree(1, 3, 20)
    x = qkv(tree, 0)
    out, _ = tree_attention_forward(MODULE, *x, None, tree=tree)
    torch.testing.assert_close(out, dense(x, tree.mask(), 8**-0.5), rtol=1e-12, atol=1e-12)


def test_dropout_is_not_left_out():
    tree = random_tree(1, 3, 20)
    q, k, v = (x.detach() for x in qkv(tree, 0))
    out, _ = tree_attention_forward(MODULE, q, k, v, None, dropout=0.5, tree=tree)
    shares = out[0, 0] / v[0, :, 0].repeat_interleave(2, 0)  # the first token sees only itself, doubled or dropped
    assert set(shares.round(decimals=9).flatten().tolist()) <= {0.0, 2.0}


@pytest.mark.parametrize("length", [700, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_lower_precision(dtype, length):
    """Longer than the kernel's blocks, and short; the dtype of the values goes out, as models expect."""
    shared = tuple(range(length))
    tree = lay_out([(*shared, *(1000 * k + j for j in range(60 + 7 * (k % 3)))) for k in range(1, 7)]).tree
    x = [t.detach().to(dtype).requires_grad_() for t in qkv(tree, 0)]
    exact = [t.detach().double().requires_grad_() for t in x]
    out, _ = tree_attention_forward(MODULE, *x, None, scaling=0.3, tree=tree)
    expected = dense(exact, tree.mask(), 0.3)
    assert out.dtype == dtype
    out.double().square().sum().backward()
    expected.square().sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in [(out, expected), *((a.grad, b.grad) for a, b in zip(x, exact, strict=True))]:
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_small_subtrees_stay_apart_from_rows_beside_a_large_one():
    """The last words of a long prompt and a short row lie side by side; only the former look further up."""
    shared = tuple(range(300))
    tree = lay_out([(*shared, 1, 2, 3), (*shared, 1, 2, 4), (*shared, 5, 6, 7), (900, 901, 902, 903)]).tree
    assert [block.root for block in tree.blocks] == [True, False, True]
    ours, theirs = qkv(tree, 0), qkv(tree, 0)
    out, _ = tree_attention_forward(MODULE, *ours, None, scaling=0.3, tree=tree)
    expected = dense(theirs, tree.mask(), 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    out.square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("images", [False, True])
def test_block_mask_of_flex_attention(images):
    """What a GPU runs, in torch's plain form of it."""
    tree = random_tree(3, 8, 60)
    tree = with_images(tree) if images else tree
    q, k, v = (x.detach().float() for x in qkv(tree, 0))
    for window in (None, 7):
        mask = tree.block_mask(window)
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, scale=0.3)
        expected = dense([q, k, v], tree.mask(window), 0.3)
        torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-5, atol=1e-5)
        assert tree.block_mask(window) is mask


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore::FutureWarning")
@torch.no_grad()
def test_flex_attention_with_sinks(monkeypatch):
    """Outputs alone: a CPU has no gradients of it."""
    monkeypatch.setattr(attention_tree, "compiled_flex", lambda: flex_attention)
    tree, sinks = random_tree(5, 6, 40), torch.linspace(-1, 2, 4)
    x = [t.detach().float() for t in qkv(tree, 0)]
    out = attention_tree.flex_tree_attention(*x, tree.block_mask(None), 0.3, sink=sinks)
    torch.testing.assert_close(out, softmax_with_sinks(*x, tree.mask(), sinks), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_flex_attention_is_compiled_into_few_graphs(monkeypatch):
    """Whatever the trees are. Where there would be too many, it is not left uncompiled. Without the kernel."""
    torch._dynamo.reset()
    whole = attention_tree.compiled_flex("eager")
    monkeypatch.setattr(attention_tree, "compiled_flex", lambda: whole)

    def graphs(seed: int) -> int:
        tree = random_tree(seed, 1 + seed % 12, (3, 40, 128, 300)[seed % 4])
        tree = lay_out([range(128 * (1 + seed % 3))]).tree if seed % 7 == 0 else tree
        for window in (None, 7):
            for grad in (False, True):
                x = [t.detach().float() for t in qkv(tree, seed)]  # a CPU has no gradients of it
                with torch.set_grad_enabled(grad):
                    out = attention_tree.flex_tree_attention(*x, tree.block_mask(window), 0.3)
                if seed < 4:
                    expected = dense(x, tree.mask(window), 0.3)
                    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        return int(counters["stats"]["unique_graphs"])

    before = counters["stats"]["unique_graphs"]
    first = [graphs(seed) - before for seed in range(12)]
    assert first[-1] <= attention_tree.GRAPHS // 2, first
    assert graphs(40) == graphs(63) == graphs(70) == before + first[-1]
    torch._dynamo.reset()
    monkeypatch.setattr(attention_tree, "GRAPHS", 1)
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        graphs(1)
    torch._dynamo.reset()


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("at_a_time", [1, 4 * 128 * 1200, prefix_tree.PAIRS_AT_A_TIME])
def test_blocks_of_flex_attention_are_found_a_few_at_a_time(monkeypatch, at_a_time, window, images):
    """The same as torch finds with all pairs in memory."""
    monkeypatch.setattr(prefix_tree, "PAIRS_AT_A_TIME", at_a_time)
    shared = tuple(range(500))
    tree = lay_out([(*shared, *(1000 * k + j for j in range(70 + k))) for k in range(1, 9)]).tree
    tree = with_images(tree) if images else tree
    count = len(tree.ends)
    assert count > 8 * 128
    assert count % 128
    ours = tree.block_mask(window)
    theirs = create_block_mask(ours.mask_mod, None, None, count, count, device="cpu")
    assert ours.seq_lengths == theirs.seq_lengths
    for of in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(theirs, f"{of}_num_blocks")
        assert torch.equal(getattr(ours, f"{of}_num_blocks"), counts)
        assert (counts.sum() > 3) == (window is None or not of.startswith("full"))  # a window leaves no block whole
        listed = torch.arange(counts.shape[-1]) < counts[..., None]
        assert torch.equal(getattr(ours, f"{of}_indices")[listed], getattr(theirs, f"{of}_indices")[listed])


def rows_one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, level: flash.Level, scale: float):
    """What FlashAttention's kernels for rows of different lengths compute, from the definition."""
    outs, lses = [], []
    starts = zip(
        level.query_bounds[:-1], level.query_bounds[1:], level.key_bounds[:-1], level.key_bounds[1:], strict=True
    )
    for q_start, q_stop, k_start, k_stop in starts:
        shared = q.shape[1] // k.shape[1]
        keys, values = (x[k_start:k_stop].repeat_interleave(shared, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q_start:q_stop], keys) * scale
        if level.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        lses.append(scores.logsumexp(-1))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(outs), torch.cat(lses, 1)


def rows_one_by_one_backward(grad, q, k, v, out, lse, level, scale):
    """The gradients of scores whose softmax has these log-sum-exps, over more keys than are read here."""
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    shared = q.shape[1] // k.shape[1]
    bounds = zip(
        level.query_bounds[:-1], level.query_bounds[1:], level.key_bounds[:-1], level.key_bounds[1:], strict=True
    )
    for q_start, q_stop, k_start, k_stop in bounds:
        queries, at = slice(q_start, q_stop), slice(k_start, k_stop)
        keys, values = (x[at].repeat_interleave(shared, 1) for x in (k, v))
        weights = (torch.einsum("qhd,khd->hqk", q[queries], keys) * scale - lse[:, queries, None]).exp()
        if level.causal:
            weights = weights.tril()
        of_weights = torch.einsum("qhd,khd->hqk", grad[queries], values)
        of_scores = weights * (of_weights - (grad[queries] * out[queries]).sum(-1).T[..., None]) * scale
        grads[0][queries] = torch.einsum("hqk,khd->qhd", of_scores, keys)
        for x, found in (
            (grads[1], torch.einsum("hqk,qhd->khd", of_scores, q[queries])),
            (grads[2], torch.einsum("hqk,qhd->khd", weights, grad[queries])),
        ):
            x[at] = found.unflatten(1, (k.shape[1], shared)).sum(2)
    return tuple(grads)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 12))
def test_levels_of_a_tree_add_up_to_it(seed, rows, longest):
    """Merged outputs and gradients of calls are those of dense attention, with kernels from the definition."""
    tree = random_tree(seed, rows, longest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "MOST_LEVELS", 99)
        patch.setattr(flash, "flash_rows", rows_one_by_one)
        patch.setattr(flash, "flash_rows_backward", rows_one_by_one_backward)
        ours, theirs = qkv(tree, seed), qkv(tree, seed)
        out = flash.LevelledAttention.apply(*(x[0].transpose(0, 1) for x in ours), None, tree.levels, 0.3)
        expected = dense(theirs, tree.mask(), 0.3)[0]
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 20))
def test_levels_show_what_the_tree_shows(seed, rows, longest):
    """Each pair of tokens in one level, once."""
    tree = random_tree(seed, rows, longest)
    count = len(tree.ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "MOST_LEVELS", 99)
        found = tree.levels
    order, shown = torch.arange(count), torch.zeros(count, count)
    for level in found:
        queries, keys = order[level.queries], order[level.keys]
        assert (level.query_bounds[-1], level.key_bounds[-1]) == (len(queries), len(keys))
        assert (level.query_bounds.diff().max(), level.key_bounds.diff().max()) == (level.most_queries, level.most_keys)
        for row in range(len(level.query_bounds) - 1):
            its_queries, its_keys = (
                x[bounds[row] : bounds[row + 1]]
                for x, bounds in ((queries, level.query_bounds), (keys, level.key_bounds))
            )
            seen = torch.ones(len(its_queries), len(its_keys))
            shown[its_queries[:, None], its_keys] += seen.tril() if level.causal else seen
    assert torch.equal(shown, tree.mask().float())


def test_trees_of_many_levels_or_rows_are_left_to_flex_attention():
    shared = tuple(range(200))
    assert len(lay_out([(*shared, 1), (*shared, 2)]).tree.levels) == 2
    assert len(lay_out([(*shared, 1), (900, 2)]).tree.levels) == 1
    assert len(lay_out([(task, reply) for task in range(9) for reply in range(9)]).tree.levels) == 2
    assert lay_out([shared[:k] for k in range(1, 200, 20)]).tree.levels is None
    assert lay_out([(1, k) for k in range(511)]).tree.levels is None


@pytest.mark.gpu
@pytest.mark.parametrize("by_levels", [True, False])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("dtype", "width", "tolerance"),
    [(torch.float32, 64, 1e-4), (torch.bfloat16, 64, 2e-2), (torch.float64, 64, 1e-10), (torch.float32, 8, 1e-4)],
)
@pytest.mark.parametrize("rows", [60, 2])
def test_a_gpu_computes_the_same(monkeypatch, dtype, width, tolerance, window, rows, by_levels):
    """By FlashAttention or FlexAttention, and what their kernels do not take by dense attention; few tokens, too."""
    monkeypatch.setattr(flash, "MOST_LEVELS", 99 if by_levels else -1)
    tree = random_tree(0, rows, 90)
    assert (64 < len(tree.ends) < 128) == (rows == 2)  # 128 queries of two heads are a block
    assert error("cuda", tree, dtype, width, window) <= tolerance


def error(
    device: str,
    tree: PrefixTree,
    dtype: torch.dtype,
    width: int,
    window: int | None = None,
    heads: tuple[int, int] = (4, 2),
    autocast: bool = False,
) -> float:
    """The largest relative one of output and gradients, against dense attention of the same numbers in float64.

    Under autocast, queries and keys come in float32 and values in bfloat16, as models with rotary positions give them.
    """
    if device != "cpu":
        torch._dynamo.reset()  # no run has so many graphs
    tree = replace(tree, ends=tree.ends.to(device), positions=tree.positions.to(device))
    shapes = [(1, count, len(tree.ends), width) for count in (heads[0], heads[1], heads[1])]
    x = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    exact = [t.double().requires_grad_() for t in x]
    x = [t.float() for t in x[:2]] + x[2:] if autocast else x
    x = [t.requires_grad_() for t in x]
    module = SimpleNamespace(num_key_value_groups=heads[0] // heads[1], training=True)
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
        out, _ = tree_attention_forward(module, *x, None, scaling=0.3, tree=tree, sliding_window=window)
    expected = dense(exact, tree.mask(window), 0.3)
    out.double().square().sum().backward()
    expected.square().sum().backward()
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(x, exact, strict=True))]
    least = 1e-9 * expected.norm()  # of a gradient; that of a query with one key is 0
    return max(float((a.double() - b).norm() / (b.norm() if b.norm() > least else expected.norm())) for a, b in pairs)


TREES = {
    "one token": [(1,)],
    "single tokens": [(k,) for k in range(5)],
    "single tokens below a prompt": [(*range(50, 180), k) for k in range(5)],
    "nothing in common": [tuple(range(1000 * k, 1000 * k + 100 + 70 * k)) for k in range(5)],
    "a prompt": [(*range(300), *range(1000 * k, 1000 * k + 40 + 100 * k)) for k in range(1, 6)],
    "a prompt and one row more": [*((*range(300), 1000 * k, 1) for k in range(1, 4)), (7, 8, 9)],
    "a prompt and tasks": [
        (*range(200), *range(1000 * (k % 3), 1000 * (k % 3) + 90), *range(9000 * k, 9000 * k + 30))
        for k in range(1, 10)
    ],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("heads", "width"), [((4, 4), 64), ((14, 2), 64), ((16, 2), 128), ((9, 3), 40), ((4, 1), 256)])
def test_flash_attention_of_each_level(name, heads, width):
    tree = lay_out(TREES[name]).tree
    assert tree.levels is not None
    assert error("cuda", tree, torch.bfloat16, width, heads=heads) <= 2e-2
    assert error("cuda", tree, torch.bfloat16, width, heads=heads, autocast=True) <= 2e-2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokens", [1, 127, 128, 129])
@pytest.mark.parametrize("heads", [(4, 2), (14, 2)])
@pytest.mark.parametrize("most_levels", [-1, flash.MOST_LEVELS])
def test_layouts_of_few_tokens_and_of_whole_blocks(monkeypatch, device, tokens, heads, most_levels):
    """And heads whose number is no power of two."""
    monkeypatch.setattr(flash, "MOST_LEVELS", most_levels)
    tree = lay_out([range(tokens)]).tree
    assert error(device, tree, torch.float32, 32, heads=heads) <= 1e-4
    assert error(device, tree, torch.bfloat16, 32, heads=heads, autocast=True) <= 2e-2


@pytest.mark.parametrize(
    ("width", "itemsize", "shared_memory", "block"),
    [
        # A40, L40S and RTX have 101,376 bytes, A100 166,912, H100, H200 and B200 232,448
        *((128, 2, 101_376, None), (256, 2, 101_376, 32), (256, 2, 166_912, None), (512, 2, 232_448, 16)),
        *((64, 4, 101_376, None), (128, 4, 101_376, 32), (128, 4, 166_912, None), (512, 4, 232_448, None)),
        *((80, 4, 166_912, 32), (80, 4, 232_448, None), (80, 2, 101_376, None), (192, 4, 232_448, 16)),
    ],
)
def test_blocks_of_flex_attention_are_smaller_where_its_own_do_not_fit(width, itemsize, shared_memory, block):
    options = flex_options(width, itemsize, shared_memory)
    sizes = {size for name, size in options.items() if name.startswith("BLOCK_")}
    assert sizes == (set() if block is None else {block})
    assert options["FORCE_USE_FLEX_ATTENTION"]


def test_fewer_blocks_of_flex_attention_are_loaded_ahead_where_a_window_leaves_no_room():
    """Heads of 128 leave 2 KiB of the 99 that the GPUs of most workstations have, and positions take more."""
    of = partial(flex_options, 128, 2)
    assert of(101_376, windowed=True) == {**of(101_376), "num_stages": 2}
    assert of(166_912, windowed=True) == of(166_912) == of(101_376)


@pytest.mark.gpu
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "width", "window"),
    [
        *((torch.bfloat16, 2e-2, width, None) for width in (20, 80, 128, 256, 512)),
        *((torch.float32, 1e-4, width, None) for width in (80, 128, 256)),
        (torch.bfloat16, 2e-2, 128, 40),
    ],
)
def test_a_gpu_has_room_for_heads_of_each_width(monkeypatch, dtype, tolerance, width, window, small):
    """In the memory that a block of threads has; also with the blocks that a smaller GPU needs."""
    monkeypatch.setattr(flash, "MOST_LEVELS", -1)
    if small:
        monkeypatch.setattr(attention_tree, "_shared_memory", lambda device: 101_376)
    assert error("cuda", random_tree(0, 9, 90), dtype, width, window) <= tolerance


@pytest.mark.gpu
def test_a_tree_of_many_tokens_takes_little_memory_on_a_gpu():
    """All pairs of them would be 4 GiB of booleans."""
    tree = lay_out([(*range(1000), *(1000 * k + j for j in range(64))) for k in range(1, 1000)], "cuda").tree
    assert len(tree.ends) > 2**16 - 2000
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tree.block_mask()
    assert torch.cuda.max_memory_allocated() - before < 2**28


def test_a_family_that_drops_the_tree_is_named():
    tree = random_tree(0, 2, 5)
    with pytest.raises(ValueError, match="SimpleNamespace"):
        tree_attention_forward(MODULE, *qkv(tree, 0), no_mask(torch.device("cpu")), scaling=0.3)
    with pytest.raises(ValueError, match=r"SimpleNamespace"):
        tree_attention_forward(MODULE, *qkv(tree, 0), None, scaling=0.3, tree=tree, softcap=30.0)


@pytest.mark.parametrize("window", [6, 100])
def test_sliding_windows(tmp_path, window):
    """Rows shorter than the window, and rows longer than it."""
    policy = LanguageModel(load_causal_lm(str(tiny_model_folder(tmp_path, "mistral", sliding_window=window))))
    draw = random.Random(0)
    shared = tuple(draw.choices(range(100), k=12))
    rows = [text_row((*shared, *draw.choices(range(100), k=9)), (4, 14, 19)) for _ in range(3)]
    hidden = policy.hidden(pack(rows))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    expected = torch.cat(
        [plain.model(torch.tensor([r.ids])).last_hidden_state[0, list(r.logit_positions)] for r in rows]
    )
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
