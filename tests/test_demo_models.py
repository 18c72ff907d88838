"""The demo's models: variants, seeded weights, and tensor parallelism in real processes over gloo."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import numpy
import pytest

from pdxfer.builders import Storage
from pdxfer.connectors import hf
from pdxfer.connectors.paged import PagedCaches
from pdxfer.demo import models, tp
from pdxfer.errors import InternalError, MisuseError
from tests.conftest import require

torch = require("torch")
transformers = require("transformers")

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other

TOKENS, STEPS = 37, 8

#: Every pair of TP sizes whose prefill and decode are compared with TP 1, in one go.
SIZES = (2, 3, 4)


def prompt() -> Any:
    return torch.randint(0, models.VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(5))


def generate(model: Any, *, after_prefill: Any = None) -> Any:
    """Logits of the prompt's last token and of eight greedy steps, ``[9, vocabulary]``."""
    cache = hf.new_cache(model.config)
    with torch.inference_mode():
        logits = [hf.forward(model, prompt(), cache)[0, -1]]
        if after_prefill:
            after_prefill(cache)
        for _ in range(STEPS):
            logits.append(hf.forward(model, logits[-1].argmax().view(1, 1), cache)[0, -1])
    return torch.stack(logits)


def in_pages(config: Any, size: int, rank: int, cache: Any) -> dict[tuple[str, int], tuple[Any, Any]]:
    """The cache of one rank by component and layer: its box, and the values ``[rows, *box]`` read back from pages."""
    layout = hf.layout_for_model(config, size, Storage(page_tokens=5, pages=16, slots=2))
    paged = PagedCaches(layout, rank, [bytearray(r.nbytes) for r in layout.ranks[rank].regions])
    tables = paged.allocate(TOKENS)
    hf.write_cache(paged, tables, cache, TOKENS)
    return {
        (c.name, layer): (paged.holding(c.name, layer).box, paged.read(c.name, layer, tables, TOKENS).view("float32"))
        for layer, c in paged.components()
    }


def rank_process(rank: int, store: str, pipe: Any) -> None:
    """One of four ranks: runs every model at every size that needs it, and sends logits and caches."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    tp.init_gloo(rank, max(SIZES), store)
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    results = []
    for name in models.MODELS:
        for size in (s for s in SIZES if rank < s):
            config = models.demo_config(name, (size,))
            model = tp.shard_model(models.build_model(config).state_dict(), config, rank, size, groups[size])
            caches = {}
            logits = generate(model, after_prefill=lambda c, x=(config, size): caches.update(in_pages(*x, rank, c)))  # noqa: B023
            results.append((name, size, logits.numpy(), caches))
    dist.barrier()
    pipe.send(results)  # not earlier: a rank that waits for its reader would hold up the others
    pipe.close()
    os._exit(0)  # gloo's threads sometimes abort an interpreter that ends by itself


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of all ranks: (name, size) to a list of (logits, caches), by rank."""
    context = multiprocessing.get_context("spawn")
    store = str(tmp_path_factory.mktemp("gloo") / "store")
    pipes, processes = [], []
    for rank in range(max(SIZES)):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=rank_process, args=(rank, store, theirs))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    results: dict[tuple[str, int], list[Any]] = {}
    for pipe in pipes:
        for name, size, logits, caches in pipe.recv():
            results.setdefault((name, size), []).append((torch.from_numpy(logits), caches))
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0] * len(processes)
    return results


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", models.MODELS)
def test_ranks_compute_what_one_process_computes(ranks, name, size):
    expected = generate(models.build_model(models.demo_config(name, (size,))))
    assert len(ranks[name, size]) == size
    for logits, _ in ranks[name, size]:
        assert (logits - expected).abs().max() < 1e-5
        assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", models.MODELS)
def test_caches_of_all_ranks_together_are_the_caches_of_one_process(ranks, name, size):
    config = models.demo_config(name, (size,))
    whole: dict[tuple[str, int], tuple[Any, Any]] = {}
    generate(models.build_model(config), after_prefill=lambda cache: whole.update(in_pages(config, 1, 0, cache)))
    for key, (_, expected) in whole.items():
        covered = torch.zeros(expected.shape, dtype=torch.bool)
        for _, caches in ranks[name, size]:
            box, values = caches[key]
            where = (slice(None), *(slice(a, b) for a, b in zip(box.starts, box.stops, strict=True)))
            numpy.testing.assert_allclose(values, expected[where], rtol=1e-4, atol=1e-4, err_msg=str(key))
            covered[where] = True
        assert covered.all(), key


@pytest.mark.parametrize("name", models.MODELS)
def test_every_component_of_every_layer_shows_in_the_logits(name):
    """An error in any component must be visible at the demo's 1e-5: greedy tokens alone would miss most."""
    config = models.demo_config(name)
    model = models.build_model(config)
    healthy = generate(model)
    layout = hf.layout_for_model(config, 1, Storage(pages=16))
    paged = PagedCaches(layout, 0, [bytearray(r.nbytes) for r in layout.ranks[0].regions])
    for layer, component in paged.components():

        def wipe(cache, layer=layer, component=component):
            tables = paged.allocate(TOKENS)
            hf.write_cache(paged, tables, cache, TOKENS)
            paged.write(component.name, layer, tables, TOKENS, 0)
            cache.layers[layer] = hf.read_cache(paged, tables, config, TOKENS).layers[layer]
            paged.free(tables)

        damaged = generate(model, after_prefill=wipe)
        assert (damaged - healthy).abs().max() > 1e-4, (component.name, layer)


def test_weights_depend_on_the_seed_alone():
    config = models.demo_config("qwen3-next")
    torch.manual_seed(1)
    first = models.build_model(config, seed=3).state_dict()
    torch.manual_seed(2)
    again, other = models.build_model(config, seed=3).state_dict(), models.build_model(config, seed=4).state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("pair", [(4, 2), (2, 4), (3, 2), (1, 4), (3, 4)])
def test_demo_pairs_have_a_variant(name, pair):
    config = models.demo_config(name, pair)
    for size in pair:
        tp.rank_config(config, size)


def test_four_ranks_share_two_kv_heads():
    config = tp.rank_config(models.demo_config("nemotron-h", (4, 2)), 4)
    assert config.num_key_value_heads == 1
    assert models.demo_config("nemotron-h", (4, 2)).num_key_value_heads == 2


def test_impossible_sizes_are_refused_with_those_that_work():
    with pytest.raises(MisuseError, match="5") as caught:
        models.demo_config("kimi-linear", (5,))
    assert "{1, 2, 4, 8}" in caught.value.hint
    with pytest.raises(MisuseError, match="no demo model") as caught:
        models.demo_config("qwen2")
    assert "qwen3-next" in caught.value.hint


def test_a_rank_config_that_does_not_divide_names_the_field():
    with pytest.raises(MisuseError, match="num_attention_heads is 8"):
        tp.rank_config(models.demo_config("falcon-h1"), 3)
    config = models.demo_config("falcon-h1", (3,))
    config.mamba_rms_norm = True
    with pytest.raises(MisuseError, match="mamba_rms_norm"):
        tp.rank_config(config, 3)
    with pytest.raises(MisuseError, match="llama"):
        tp.rank_config(transformers.LlamaConfig(), 2)


def test_cut_takes_each_part_by_its_own_units():
    weight = torch.arange(10).view(10, 1)
    cut = tp.Cut(axis=0, parts=((4, 2), (4, 4), (2, 1)))
    assert cut.apply("w", weight, 0, 2).flatten().tolist() == [0, 1, 4, 5, 8, 9]
    assert cut.apply("w", weight, 1, 2).flatten().tolist() == [2, 3, 6, 7, 8, 9]
    assert cut.apply("w", weight, 1, 4).flatten().tolist() == [0, 1, 5, 8, 9]  # neighbours share the first part
    with pytest.raises(InternalError, match="shape"):
        cut.apply("w", weight[:9], 0, 2)
