"""Breaks the sources in one place at a time and asks whether the tests see it.

    python tests/mutations.py                 # every mutant: about an hour
    python tests/mutations.py prefix fault-30 # those whose name or subject has one of these words
    python tests/mutations.py --list          # what there is

Works on a copy of the tree with a build of its own, so it needs a compiler, cmake, ninja and what
`pip install -e '.[test]'` brings; the core is built for one instruction set (--isa). First the
named tests have to pass on the copy as it is. Then each mutant is put in, alone, and one of its
tests has to fail. Exit status 1: a mutant survived, which is a hole in the tests. `--write` puts
the table of all mutants, with the test that caught each, into docs/mutations.md.

pytest does not collect this file, and the gate does not run it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "mutations.md"
DRIVER = "native/[!g]*"  # driver and binding; not the gradients, which repeat some of it
CORE, ARRAY, PYTHON = "not array", "array", ""  # which backends' tests: pytest -k


@dataclass(frozen=True)
class Mutant:
    name: str  # what is broken
    subject: str  # the laws and faults that it offends
    file: str  # or a pattern of files
    old: str  # stands once in them
    new: str
    tests: tuple[str, ...]  # of which one has to fail

    @property
    def serving(self) -> str:
        if self.file.startswith("native/"):
            return CORE
        return ARRAY if self.file.endswith("/array.py") else PYTHON


def laws(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/test_laws.py::test_{name}" for name in names)


def faults(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/test_faults.py::test_{name}" for name in names)


def threads(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/test_threads.py::test_{name}" for name in names)


def torch(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/torch/test_{file}.py::test_{name}" for name in names)


PROJECTED = ("tests/test_fused.py::test_equals_features_made_first",)

MUTANTS = [
    # -- projections ------------------------------------------------------------------------------
    Mutant(
        "a projection forgets its bias",
        "law 1",
        "native/projection.h",
        "load(row + c) + load(bias + c)",
        "load(row + c)",
        PROJECTED,
    ),
    Mutant(
        "a projection's second half goes up where it ought to go down",
        "law 1",
        "native/projection.h",
        "-load(row + c) - down",
        "-load(row + c) + down",
        PROJECTED,
    ),
    Mutant(
        "a projection's square of x leaves out what is no whole vector",
        "law 1, fault 10",
        "native/projection.h",
        "  if (c < count) {\n    const Vec<T> rest",
        "  if (c > count) {\n    const Vec<T> rest",
        PROJECTED,
    ),
    Mutant(
        "rows are projected where they lie, whatever they are",
        "law 10",
        "native/projection.h",
        "rows_of<T>(layer.dtype, view, begin, rows, w.x, false, room, w.x_row)",
        "Rows<T>{reinterpret_cast<const T*>(view.data + begin * view.row), view.row / 4}",
        PROJECTED,
    ),
    Mutant(
        "queries with weights of their own are projected as keys are",
        "law 1",
        "native/units.h",
        "      layer.query_projection += at.head * layer.query_projection_step;",
        "      layer.query_projection = layer.projection;",
        ("tests/test_fused.py::test_weights_of_queries",),
    ),
    Mutant(
        "the first head's weights serve the queries of all",
        "law 1, law 2",
        "native/call.h",
        "layer.query_projection_step = queries->heads() > 1;",
        "layer.query_projection_step = 0;",
        ("tests/test_fused.py::test_weights_of_queries_by_head",),
    ),
    Mutant(
        "softmax over features of the second half begins a number early",
        "law 1",
        "native/projection.h",
        "log_softmax(row + count / 2, count / 2);",
        "log_softmax(row + count / 2 - 1, count / 2);",
        PROJECTED,
    ),
    Mutant(
        "softmax over features leaves out what is no whole vector",
        "law 1, fault 10",
        "native/finishes.h",
        "  if (rest) add(load_part(z + whole, rest, low));",
        "",
        PROJECTED,
    ),
    Mutant(
        "softmax over features passes no NaN on",
        "law 1",
        "native/finishes.h",
        "sum += (below != below) ? below : exp_nonpositive<T>(below);",
        "sum += (below != below) ? Vec<T>{} : exp_nonpositive<T>(below);",
        ("tests/test_fused.py::test_a_nan_is_in_all_features_of_its_row",),
    ),
    Mutant(
        "a cosine's sign is that of the sine",
        "law 1",
        "native/elementary.h",
        "(((quarter + one) & two) << to_sign)",
        "((quarter & two) << to_sign)",
        PROJECTED,
    ),
    Mutant(
        "directions of rows as of their squares, which leave the range",
        "law 1",
        "native/projection.h",
        "row[c] = from[c] / greatest;",
        "row[c] = from[c];",
        ("tests/test_fused.py::test_lengths_whose_squares_leave_the_range",),
    ),
    Mutant(
        "neighbours end at the last feature",
        "law 1",
        "native/finishes.h",
        "__builtin_memcpy(r + ring, r, static_cast<size_t>(ring) * sizeof(T));",
        "__builtin_memset(r + ring, 0, static_cast<size_t>(ring) * sizeof(T));",
        PROJECTED,
    ),
    Mutant(
        "the middle frequency of an even width is left as it is",
        "law 1",
        "native/finishes.h",
        "if (both + 1 < real) a[both + 1]",
        "if (both + 1 < 0) a[both + 1]",
        PROJECTED,
    ),
    Mutant(
        "pairs of features that stand for two count once",
        "law 1",
        "native/finishes.h",
        "splat(factors[i] * root)",
        "splat(factors[i])",
        PROJECTED,
    ),
    Mutant(
        "the positions of a packed sequence begin anew",
        "law 9",
        "native/units.h",
        "at.q.first = at.k.first = first;",
        "",
        ("tests/test_fused.py::test_every_verb_makes_them_inside",),
    ),
    Mutant(
        "the quadratic order makes features of the first head",
        "law 1, law 2",
        "native/driver.cpp",
        "note(kernels_.quadratic(layer_of(at), at.q,",
        "note(kernels_.quadratic(p_.layer, at.q,",
        ("tests/test_fused.py::test_weights_by_head",),
    ),
    Mutant(
        "features that are products count as an honest 0",
        "law 1",
        "native/query.h",
        "  if (may_vanish(layer)) return false;\n",
        "",
        ("tests/test_fused.py::test_products_too_small_for_float",),
    ),
    Mutant(
        "a state leaves out keys whose features vanish in float",
        "law 1",
        "native/absorb.h",
        "return all_below(k_sum_, w_.d, T(kLeastSum));",
        "return false;",
        ("tests/test_fused.py::test_keys_too_small_for_float_are_in_a_state",),
    ),
    Mutant(
        "a step leaves out a key whose features vanish in float",
        "law 1",
        "native/step.h",
        "if (may_vanish(layer) && all_below(row, w.d, T(kLeastSum))) return false;",
        "",
        ("tests/test_fused.py::test_keys_too_small_for_float_are_in_a_state",),
    ),
    Mutant(
        "whatever projects queries is taken for the project's own",
        "law 1",
        "src/linattn/feature_maps/_base.py",
        'own == getattr(self.project, "queries", None)',
        "hasattr(self.project, 'query_recipe')",
        ("tests/torch/test_fused.py::test_queries_with_a_layer_of_their_own",),
    ),
    Mutant(
        "weights are known by their shape",
        "law 1",
        "src/linattn/feature_maps/_learned.py",
        " and bool((a == b).all())",
        "",
        ("tests/test_fused.py::test_weights_that_change_are_seen",),
    ),
    Mutant(
        "a query of NaN counts as one that has seen no key",
        "law 1",
        "native/query.h",
        " && total == total;",
        ";",
        ("tests/test_attention.py::test_rows_that_are_nan_throughout_give_nan",),
    ),
    # -- kernels ----------------------------------------------------------------------------------
    Mutant(
        "products leave out the last of an odd number of features",
        "law 1, fault 10",
        "native/products.h",
        "    for (; p < depth; ++p) {",
        "    for (; p + 1 < depth; ++p) {",
        laws("definition") + faults("10_every_width"),
    ),
    Mutant(
        "exp's polynomial has a wrong digit",
        "law 1",
        "native/elementary.h",
        "0.4999999403953552f",
        "0.4999f",
        laws("definition_of_the_numerator", "definition"),
    ),
    Mutant(
        "sigmoid as 1 - 1 / (1 + exp(x))",
        "law 1",
        "native/maps.h",
        "return 1 / (1 + exp_of<T>(-x));",
        "return 1 - 1 / (1 + exp_of<T>(x));",
        laws("definition_far_from_the_origin"),
    ),
    Mutant(
        "no second pass over rows that left the range of float",
        "law 1",
        DRIVER,
        "if (!run.troubled()) return true;",
        "return true;",
        laws("definition_beyond_the_range_of_float"),
    ),
    Mutant(
        "the quadratic order's denominator is that of the last keys alone",
        "law 2",
        "native/quadratic.h",
        "denominators[r] +=",
        "denominators[r] =",
        laws("order"),
    ),
    Mutant(
        "partial sums are merged in units of the first",
        "law 3, law 5",
        DRIVER,
        "theirs = exact_power(b - top);",
        "theirs = exact_power(a - top);",
        laws("monoid", "continuation_in_pieces"),
    ),
    Mutant(
        "weights above the diagonal stay in the denominator",
        "law 4, fault 8",
        "native/causal.h",
        "for (int64_t c = r + i + 1; c < columns; ++c)",
        "for (int64_t c = columns; c < columns; ++c)",
        laws("prefix") + faults("08_no_look_ahead"),
    ),
    Mutant(
        "values above the diagonal are multiplied by 0",
        "law 4",
        "native/products.h",
        "        if (i < p) continue;\n",
        "",
        laws("prefix"),
    ),
    Mutant(
        "a key inside a chunk raises the scale of its earlier rows",
        "law 4, fault 8",
        "native/causal.h",
        "    if (r > 0) return r;\n",
        "",
        laws("prefix") + faults("08_no_look_ahead"),
    ),
    Mutant(
        "a half that overflows on its way out is found in the second pass alone",
        "law 4",
        "native/query.h",
        " || overflows_half(layer, ready, rows));",
        ");",
        laws("prefix_of_rows_that_overflow"),
    ),
    Mutant(
        "the pieces of a causal sequence forget the state given",
        "law 5, fault 13",
        DRIVER,
        "start(shared(unit, 0), place_of(unit, 0).before);",
        "clear(shared(unit, 0));",
        laws("continuation_in_pieces"),
    ),
    Mutant(
        "a state given is not taken over",
        "law 5, fault 13",
        DRIVER,
        "    if (p_.before.kv)\n      copy(state, state_at(p_.before, before));\n    else\n"
        "      clear(state);",
        "    clear(state);",
        laws("continuation") + faults("13_the_state_is_carried"),
    ),
    Mutant(
        "packed sequences all start from the first one's state",
        "law 5",
        DRIVER,
        "      at.before += sequence_of(unit) * before_stride();\n",
        "",
        laws("continuation_of_packed_sequences"),
    ),
    Mutant(
        "the key sum leaves out the last key of a block",
        "law 6, law 7",
        "native/absorb.h",
        "  for (int64_t r = 0; r < rows; ++r)\n#pragma GCC unroll 4\n"
        "    for (int j = 0; j < NV; ++j) sum[j] +=",
        "  for (int64_t r = 0; r + 1 < rows; ++r)\n#pragma GCC unroll 4\n"
        "    for (int j = 0; j < NV; ++j) sum[j] +=",
        laws("permutation", "constant"),
    ),
    Mutant(
        "negative sums are cut off at 0",
        "law 7",
        "native/prepared.h",
        "ready.kv[d * w.v_row + c] = static_cast<T>(state.kv[d * w.v + c]);",
        "ready.kv[d * w.v_row + c] = static_cast<T>(state.kv[d * w.v + c] < 0 ? 0 : "
        "state.kv[d * w.v + c]);",
        laws("linearity"),
    ),
    Mutant(
        "the scale of a state is raised without what is pending",
        "law 3",
        "native/absorb.h",
        "        pending.flush();\n        raise_scales(",
        "        raise_scales(",
        laws("monoid"),
    ),
    Mutant(
        "masked keys stay in the denominator",
        "law 8, fault 5",
        "native/absorb.h",
        "      clear_masked(kept, phi, w.d_row, rows);\n",
        "",
        laws("mask") + faults("05_06_masked_keys_are_as_if_removed"),
    ),
    Mutant(
        "masked values are multiplied by 0",
        "law 8, fault 6",
        "native/absorb.h",
        "      clear_masked(kept, values, w.v_row, rows);\n",
        "",
        laws("mask") + faults("05_06_masked_keys_are_as_if_removed"),
    ),
    Mutant(
        "masked keys stay in the denominator of the causal form",
        "law 8, fault 5",
        "native/causal.h",
        "      clear_masked(kept, phi_k, w.d_row, rows);\n",
        "",
        laws("mask_causal") + faults("05_06_masked_keys_are_as_if_removed"),
    ),
    Mutant(
        "masked values are multiplied by 0 in the causal form",
        "law 8, fault 6",
        "native/causal.h",
        "      clear_masked(kept, values, w.v_row, rows);\n",
        "",
        laws("mask_causal") + faults("05_06_masked_keys_are_as_if_removed"),
    ),
    Mutant(
        "0 / 0 where all keys are masked",
        "law 8, fault 7, fault 4",
        "native/query.h",
        "    if (lost || unseen || total == 0)\n",
        "    if (lost)\n",
        faults("07_fully_masked", "04_zero_rows"),
    ),
    Mutant(
        "eps in units of the exponential map's scales",
        "law 1, fault 4",
        "native/query.h",
        "static_cast<T>(layer.eps * exact_power(static_cast<int64_t>(-power[r])));",
        "static_cast<T>(layer.eps);",
        laws("definition_with_any_eps"),
    ),
    Mutant(
        "a step adds eps to the numerator's side",
        "fault 4",
        "native/step.h",
        "    total = eps + dot_of(phi_q, state.k_sum, w.d);",
        "    total = eps * eps + dot_of(phi_q, state.k_sum, w.d);",
        faults("04_eps_is_added_to_the_denominator_everywhere"),
    ),
    Mutant(
        "elu + 1",
        "fault 1",
        "native/maps.h",
        "return vmax<T>(zero, x) + exp_nonpositive<T>(vmin<T>(zero, x));",
        "return (vmax<T>(zero, x) + (exp_nonpositive<T>(vmin<T>(zero, x)) - 1)) + 1;",
        faults("01_elu1_does_not_cancel"),
    ),
    Mutant(
        "the key sum is kept in half precision",
        "law 13, fault 2",
        "native/absorb.h",
        "      add_to_state(state_.k_sum, k_sum_, w_.d);\n",
        "      add_to_state(state_.k_sum, k_sum_, w_.d);\n"
        "      for (int64_t d = 0; d < w_.d && layer_.dtype == DType::float16; ++d)\n"
        "        state_.k_sum[d] = widen_half(narrow_half(static_cast<float>(state_.k_sum[d])));\n",
        laws("dtype_neither_overflows_nor_vanishes") + faults("02_half_precision_sums"),
    ),
    Mutant(
        "sums over the sequence stay in float32",
        "law 11, fault 3",
        "native/prepared.h",
        "constexpr int64_t kFlushRows = 512;",
        "constexpr int64_t kFlushRows = int64_t{1} << 40;",
        laws("length") + faults("03_float32_sums_do_not_saturate"),
    ),
    Mutant(
        "weights of a chunk in whole vectors alone",
        "fault 9",
        "native/causal.h",
        "const int64_t columns = round_up<T>(r + MR);",
        "const int64_t columns = (r + MR) / kLanes<T> * kLanes<T>;",
        faults("09_every_length"),
    ),
    Mutant(
        "padding holds phi(0)",
        "fault 10",
        "native/maps.h",
        "      for (int64_t c = rest; c < lanes; ++c) tail[c] = 0;\n",
        "",
        faults("10_every_width"),
    ),
    Mutant(
        "a step forgets the key sum",
        "law 5, fault 13",
        "native/step.h",
        "  for (int64_t d = 0; d < w.d; ++d) state.k_sum[d] += phi_k[d];\n",
        "",
        laws("continuation") + faults("13_the_state_is_carried"),
    ),
    Mutant(
        "the scales of exponential keys are never raised",
        "fault 21",
        "native/rows.h",
        " + kHeadroom);",
        " + (1 << 29));",
        faults("21_exponential_maps_stay_finite") + laws("definition_beyond_the_range_of_float"),
    ),
    Mutant(
        "one scale for all features of an exponential map",
        "fault 21",
        "native/rows.h",
        "raise_scale(layer, state, d, static_cast<int32_t>(top[d]));",
        "raise_scale(layer, state, d, static_cast<int32_t>(top[0] > top[1] ? top[0] : top[1]));",
        faults("21_no_scale_for_all_features", "21_exponential_maps_stay_finite"),
    ),
    Mutant(
        "features that do not lie side by side are read as if they did",
        "law 10",
        "native/blocks.h",
        "in_place = is_working<T>(dtype) && view.col == static_cast<int64_t>(sizeof(T)) &&",
        "in_place = is_working<T>(dtype) &&",
        laws("layout"),
    ),
    Mutant(
        "whole vectors are written past the end of an output's row",
        "law 10",
        "native/query.h",
        "             w.v == w.v_pad;",
        "             true;",
        laws("layout_of_the_output"),
    ),
    Mutant(
        "a mask clears the caller's values in place",
        "law 10, fault 19",
        "native/absorb.h",
        "      right = copied_rows(right, rows, w, values);\n"
        "      clear_masked(kept, phi, w.d_row, rows);\n"
        "      clear_masked(kept, values, w.v_row, rows);\n",
        "      clear_masked(kept, phi, w.d_row, rows);\n"
        "      for (int64_t r = 0; r < rows; ++r)\n"
        "        for (int64_t c = 0; c < w.v && !kept[r]; ++c) "
        "const_cast<T*>(right.data)[r * right.row + c] = 0;\n",
        laws("inputs_keep_their_bits") + faults("19_inputs_keep_their_bits"),
    ),
    Mutant(
        "rows beyond 2^31 bytes are found by 32 bits",
        "fault 30",
        "native/blocks.h",
        "const char* src = view.data + begin * view.row;",
        "const char* src = view.data + static_cast<int32_t>(begin * view.row);",
        faults("30_beyond_2_31_elements_all_of_them_read"),
    ),
    Mutant(
        "features beyond 2^31 bytes are found by 32 bits",
        "fault 30",
        "native/blocks.h",
        "dst[c] = fetch<T>(src + c * col);",
        "dst[c] = fetch<T>(src + static_cast<int32_t>(c * col));",
        faults("30_strides_beyond_2_31_bytes"),
    ),
    # -- the driver: batches, pieces, states ------------------------------------------------------
    Mutant(
        "values step over the batch as keys do",
        "law 9, fault 12",
        DRIVER,
        "at.v.data += step * axis.v;",
        "at.v.data += step * axis.k;",
        laws("batch") + faults("12_the_right_axis"),
    ),
    Mutant(
        "a mask does not step over the batch",
        "law 8",
        DRIVER,
        "      if (at.mask.data) at.mask.data += step * axis.mask;\n",
        "",
        laws("mask_shapes", "mask"),
    ),
    Mutant(
        "a causal call absorbs into the state that it was given",
        "fault 14",
        DRIVER,
        "    const StateRef state = result_or(unit, mine.state);\n"
        "    start(state, place_of(unit, 0).before);\n"
        "    walk(unit, state, {0, keys_of(unit)}, mine);",
        "    const bool given = p_.before.kv;\n"
        "    const StateRef state = given ? state_at(p_.before, place_of(unit, 0).before) : "
        "result_or(unit, mine.state);\n"
        "    if (!given) clear(state);\n"
        "    walk(unit, state, {0, keys_of(unit)}, mine);\n"
        "    if (given && p_.after.kv) copy(state_at(p_.after, unit), state);",
        faults("14_branches_of_a_state") + laws("continuation"),
    ),
    Mutant(
        "pieces follow the number of threads",
        "law 14",
        DRIVER,
        "const int64_t wanted = (kPieces + others - 1) / others;",
        "const int64_t wanted = (thread_count() + others - 1) / others;",
        laws("determinism"),
    ),
    Mutant(
        "sums of a piece begin with what the memory held",
        "law 14",
        DRIVER,
        "    clear(into);\n    kernels_.absorb(",
        "    kernels_.absorb(",
        laws("determinism", "definition"),
    ),
    Mutant(
        "a state for each block of the sequence",
        "fault 25",
        DRIVER,
        "const int64_t pieces = wanted < most ? wanted : most;",
        "const int64_t pieces = most;",
        faults("25_memory_does_not_grow"),
    ),
    Mutant(
        "a state for each head",
        "fault 25",
        DRIVER,
        "(!wide_queries || units_ >= kPieces || groups_ * query_pieces_ <= 2);",
        "(!wide_queries || groups_ * query_pieces_ <= 2);",
        faults("25_memory_does_not_grow_with_the_heads"),
    ),
    Mutant(
        "an empty sequence takes its neighbour's first key",
        "fault 26",
        DRIVER,
        "    return rows.end - rows.begin;",
        "    return rows.end > rows.begin ? rows.end - rows.begin : p_.n_k > 0;",
        faults("26_empty_sequences"),
    ),
    Mutant(
        "the order is chosen the wrong way round",
        "fault 24",
        DRIVER,
        "  return quadratic + again < linear;",
        "  return linear < quadratic + again;",
        ("tests/test_plan.py::test_the_native_core_repeats_the_rule",),
    ),
    # -- the binding ------------------------------------------------------------------------------
    Mutant(
        "heads of a group are taken in turn",
        "law 9",
        DRIVER,
        "    strides[count - 1] = stride * group;\n    dims[count] = group;\n"
        "    strides[count] = stride;",
        "    strides[count - 1] = stride;\n    dims[count] = group;\n"
        "    strides[count] = stride * key_heads;",
        laws("batch"),
    ),
    Mutant(
        "causal lengths that differ are taken",
        "fault 11",
        DRIVER,
        "  if (causal && call.problem.n_q != call.problem.n_k) return nb::none();\n"
        "  if (!call.take_sequences(cu_seqlens)) return nb::none();\n  if (!state.is_none()) {",
        "  if (!call.take_sequences(cu_seqlens)) return nb::none();\n  if (!state.is_none()) {",
        faults("11_causal_lengths_that_differ"),
    ),
    Mutant(
        "a mask of bytes is taken",
        "fault 23",
        DRIVER,
        "if (number == NPY_BOOL) return",
        "if (number == NPY_BOOL || number == NPY_UBYTE) return",
        faults("23_masks"),
    ),
    Mutant(
        "an axis of two is dropped as one of one is",
        "law 9, fault 27",
        DRIVER,
        "if (problem.axes[i].size != 1) problem.axes[kept++]",
        "if (problem.axes[i].size > 2) problem.axes[kept++]",
        faults("27_a_batch_of_one") + laws("batch"),
    ),
    # -- threads ----------------------------------------------------------------------------------
    Mutant(
        "a child after fork() waits for workers it does not have",
        "threads",
        "native/threads.cpp",
        "  the_pool.store(nullptr, std::memory_order_release);\n",
        "",
        threads("fork", "fork_while_others_compute"),
    ),
    Mutant(
        "a piece does not wait for the stage before",
        "law 14, threads",
        "native/threads.cpp",
        "      if (s > 0) wait_briefly(",
        "      if (s > kMaxStages) wait_briefly(",
        threads("same_bits_on_repeat") + laws("determinism"),
    ),
    # -- the array backend ------------------------------------------------------------------------
    Mutant(
        "array backend: masked keys are multiplied by 0",
        "law 8, fault 6",
        "src/linattn/backends/array.py",
        "x, values = xp.where(part, x, 0.0), xp.where(part, values, 0.0)",
        "x, values = x * part, values * part",
        laws("mask") + faults("05_06_masked_keys_are_as_if_removed"),
    ),
    Mutant(
        "array backend: chunks with values that are not finite are not cut",
        "law 4",
        "src/linattn/backends/array.py",
        "                and xp.isfinite(values.sum())\n",
        "",
        laws("prefix"),
    ),
    Mutant(
        "array backend: float64 sums forget what roundings lost",
        "law 11",
        "src/linattn/backends/array.py",
        "    return after, xp.where(xp.isfinite(lost), lost, 0.0)\n",
        "    return after, 0.0 * lost\n",
        laws("length_of_the_array_backend_in_float64"),
    ),
    Mutant(
        "array backend: merged sums keep their own units",
        "law 3",
        "src/linattn/backends/array.py",
        "        a, b = (_rescaled(xp, s, log_scale) for s in (a, b))\n",
        "",
        laws("monoid"),
    ),
    Mutant(
        "array backend: merging raises every scale",
        "law 3",
        "src/linattn/backends/array.py",
        "        log_scale = xp.maximum(a[2], b[2])\n",
        "        log_scale = xp.maximum(a[2], b[2]) + 1\n",
        laws("monoid_zeros_change_no_bit"),
    ),
    Mutant(
        "array backend: 0 / 0 where no key is seen",
        "fault 4, fault 7",
        "src/linattn/backends/array.py",
        "    return xp.where(zero, 0.0, num / xp.where(zero, 1.0, den))\n",
        "    return num / den\n",
        faults("04_zero_rows", "07_fully_masked"),
    ),
    # -- tensors ----------------------------------------------------------------------------------
    Mutant(
        "tensors: key sums are kept in half precision",
        "fault 2",
        "src/linattn/torch/_composite.py",
        "sums.k_sum + f.sum(-2), sums.log_scale)\n",
        "(sums.k_sum + f.sum(-2)).half().to(f.dtype), sums.log_scale)\n",
        torch("gradients", "02_gradients_of_long_sums_in_half_precision"),
    ),
    Mutant(
        "tensors: sums of a state in float32",
        "fault 3, fault 17",
        "src/linattn/torch/_composite.py",
        "            found = torch.float64\n",
        "            found = torch.float32\n",
        torch("faults", "03_float32_sums_do_not_saturate", "17_dtypes"),
    ),
    Mutant(
        "tensors: 0 / 0 where all weights are 0",
        "fault 4, fault 7",
        "src/linattn/torch/_composite.py",
        "    return torch.where(zero, 0.0, num / torch.where(zero, 1.0, den))\n",
        "    return num / den\n",
        torch("faults", "04_zero_rows", "07_fully_masked"),
    ),
    Mutant(
        "tensors: gradients of rows without a weight are divided by 0",
        "fault 4, fault 7",
        "src/linattn/torch/_composite.py",
        "torch.where(den == 0, 0.0, 1.0 / torch.where(den == 0, 1.0, den))",
        "1.0 / den",
        torch("faults", "04_zero_rows", "07_fully_masked"),
    ),
    Mutant(
        "tensors: eps in the dtype of the values",
        "fault 4",
        "src/linattn/torch/_composite.py",
        "    if not eps:\n        return den\n",
        "    eps = torch.tensor(eps).half().item()\n    if not eps:\n        return den\n",
        torch("faults", "04_eps_in_half_precision"),
    ),
    Mutant(
        "tensors: masked keys stay in the denominator",
        "fault 5",
        "src/linattn/torch/_composite.py",
        "    return Rows(torch.where(kept, f, 0.0), n), v\n",
        "    return Rows(f, n), v\n",
        torch("faults", "05_masked_keys_are_as_if_removed", "05_masked_keys_of_the_causal_form"),
    ),
    Mutant(
        "tensors: masked keys are multiplied by 0",
        "fault 6",
        "src/linattn/torch/_composite.py",
        "    f, n = _features(torch.where(kept, k, 0.0), kernel)\n",
        "    f, n = _features(k * kept, kernel)\n",
        torch("faults", "06_masked_rows_where_torch_differentiates"),
    ),
    Mutant(
        "tensors: gradients of masked keys are multiplied by 0",
        "fault 6",
        "src/linattn/torch/_composite.py",
        "            dphi = torch.where(kept, dphi, 0.0)\n",
        "            dphi = dphi * kept\n",
        torch("faults", "05_masked_keys_are_as_if_removed")
        + torch("gradients", "07_fully_masked_rows_have_zero_gradients"),
    ),
    Mutant(
        "tensors: weights above the diagonal stay",
        "fault 8",
        "src/linattn/torch/_composite.py",
        "        return torch.where(self.seen, x, 0.0)\n",
        "        return x\n",
        torch("attention", "08_no_look_ahead"),
    ),
    Mutant(
        "tensors: one scale for all rows of a chunk",
        "fault 8",
        "src/linattn/torch/_composite.py",
        "torch.cummax(keys.n, -2).values",
        "keys.n.amax(-2, keepdim=True).expand_as(keys.n)",
        torch("attention", "08_no_look_ahead"),
    ),
    Mutant(
        "tensors: values above the diagonal are multiplied by 0",
        "fault 8",
        "src/linattn/torch/_composite.py",
        "    if finite:\n        return scores @ values\n",
        "    if True:\n        return scores @ values\n",
        torch("attention", "08_no_look_ahead"),
    ),
    Mutant(
        "tensors: causal lengths that differ are no error",
        "fault 11",
        "src/linattn/torch/_attention.py",
        "tuple(v.shape), causal=causal, cut=cu_seqlens is not None,\n",
        "tuple(v.shape), causal=False, cut=cu_seqlens is not None,\n",
        torch("faults", "11_causal_lengths_that_differ"),
    ),
    Mutant(
        "tensors: the keys' gradients are summed over their own positions",
        "fault 11",
        "src/linattn/torch/_composite.py",
        "        for rows in _chunks(part.q.shape[-2], size):\n"
        "            queries = _features(part.q[..., rows, :], kernel)\n"
        "            seen = gathered(",
        "        for rows in _chunks(min(part.k.shape[-2], part.q.shape[-2]), size):\n"
        "            queries = _features(part.q[..., rows, :], kernel)\n"
        "            seen = gathered(",
        torch("faults", "11_lengths_that_differ"),
    ),
    Mutant(
        "tensors: a state given is not taken over",
        "fault 13",
        "src/linattn/torch/_composite.py",
        "                before = self.state\n",
        "                before = self.state.each(torch.zeros_like)\n",
        torch("state", "13_prefill_and_steps_are_one_pass"),
    ),
    Mutant(
        "tensors: the key sum of a state is not carried on",
        "fault 13",
        "src/linattn/torch/_composite.py",
        "    return Sums(sums.kv + f.mT @ values, sums.k_sum + f.sum(-2), sums.log_scale)\n",
        "    return Sums(sums.kv + f.mT @ values, f.sum(-2), sums.log_scale)\n",
        torch("state", "13_prefill_and_steps_are_one_pass"),
    ),
    Mutant(
        "tensors: copies of a state share their sums",
        "fault 14",
        "src/linattn/torch/_state.py",
        "        return self._each(lambda x: x.clone())\n",
        "        return self._each(lambda x: x)\n",
        torch("state", "14_branches"),
    ),
    Mutant(
        "tensors: a call absorbs into the state that it was given",
        "fault 14",
        "src/linattn/torch/_composite.py",
        "    return Sums(sums.kv + f.mT @ values, sums.k_sum + f.sum(-2), sums.log_scale)\n",
        "    kv = sums.kv.detach().add_(f.mT @ values) if not f.requires_grad else "
        "sums.kv + f.mT @ values\n"
        "    return Sums(kv, sums.k_sum + f.sum(-2), sums.log_scale)\n",
        torch("faults", "19_inputs_and_upstream_keep_their_bits", "14_gradients_of_branches"),
    ),
    Mutant(
        "tensors: a step changes what a gradient needs",
        "fault 14",
        "src/linattn/torch/_state.py",
        "    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)\n",
        "    return False\n",
        torch("state", "in_place_refuses_where_a_gradient_is_needed"),
    ),
    Mutant(
        "tensors: the normaliser has no gradient",
        "fault 15",
        "src/linattn/torch/_composite.py",
        "        return by, -(by * out[..., rows, :].to(exact)).sum(-1, keepdim=True)\n",
        "        return by, by.new_zeros((*by.shape[:-1], 1))\n",
        torch("gradients", "15_a_common_scale_of_queries_has_no_gradient", "gradcheck"),
    ),
    Mutant(
        "tensors: an upstream gradient is read as dense memory",
        "fault 16",
        "src/linattn/torch/_ops.py",
        "    # Each element with a gradient of its own;",
        "    grad_out = grad_out.as_strided(out.shape, out.contiguous().stride())\n"
        "    # Each element with a gradient of its own;",
        torch("gradients", "16_upstream_gradients_of_any_layout"),
    ),
    Mutant(
        "tensors: float64 is computed in float32",
        "fault 17",
        "src/linattn/torch/_composite.py",
        "    x = x if x.dtype == torch.float64 else x.to(torch.float32)\n",
        "    x = x.to(torch.float32)\n",
        torch("faults", "17_dtypes") + torch("gradients", "gradcheck"),
    ),
    Mutant(
        "tensors: a gradient has no derivative by the upstream one",
        "fault 18",
        "src/linattn/torch/_ops.py",
        "_DIFFERENTIABLE = (0, 1, 2, 3, 4, 5, 14, 15)",
        "_DIFFERENTIABLE = (3, 4, 5, 14, 15)",
        torch("gradients", "gradcheck"),
    ),
    Mutant(
        "tensors: the second derivative is nothing",
        "fault 18",
        "src/linattn/torch/_ops.py",
        "        if not pairs:\n",
        "        if pairs:\n",
        torch("gradients", "gradcheck"),
    ),
    Mutant(
        "tensors: a mask clears the caller's keys in place",
        "fault 19",
        "src/linattn/torch/_composite.py",
        "    f, n = _features(torch.where(kept, k, 0.0), kernel)\n",
        "    f, n = _features(k.masked_fill_(~kept, 0.0), kernel)\n",
        torch("attention", "05_06_19_masked_keys_are_as_if_removed"),
    ),
    Mutant(
        "random features are drawn at each call",
        "fault 20",
        "src/linattn/feature_maps/_random.py",
        "drawn = (self.seed, self.count",
        "drawn = (np.random.randint(1 << 30), self.count",
        torch("faults", "20_random_features_are_drawn_once"),
    ),
    Mutant(
        "tensors: the compiled core is called while torch traces",
        "fault 22",
        "src/linattn/torch/_direct.py",
        "_compiling = torch.compiler.is_compiling\n",
        "_compiling = bool\n",
        torch("compile", "compiled_is_eager"),
    ),
    Mutant(
        "tensors: what is traced has the sums in another dtype",
        "fault 22",
        "src/linattn/torch/_ops.py",
        "    dtype = _composite.wide(q.device)\n",
        "    dtype = q.dtype\n",
        torch("compile", "compiled_states", "opcheck_attend"),
    ),
    Mutant(
        "tensors: a mask of numbers is taken as it is",
        "fault 23",
        "src/linattn/torch/_arguments.py",
        "    if value.dtype != torch.bool:\n",
        "    if value.dtype == torch.complex64:\n",
        torch("attention", "23_masks_of_other_kinds_are_refused"),
    ),
    Mutant(
        "tensors: a gradient keeps phi of all rows",
        "fault 25",
        "src/linattn/torch/_eager.py",
        "        out, *after = result\n",
        "        out, *after = result\n        ctx.features = q.exp(), k.exp()\n",
        torch("faults", "25_memory_does_not_grow"),
    ),
    Mutant(
        "tensors: packed queries see the keys of all sequences",
        "fault 26",
        "src/linattn/torch/_composite.py",
        "            keys = rows if self.packed else slice(None)\n",
        "            keys = slice(None)\n",
        torch("faults", "26_empty_sequences"),
    ),
    Mutant(
        "tensors: all of a batch have the first one's upstream gradient",
        "fault 27",
        "src/linattn/torch/_composite.py",
        "call.rows_of(grad_out, part), ",
        "call.rows_of(grad_out[:1].expand_as(grad_out), part), ",
        torch("faults", "27_a_batch_of_one"),
    ),
    Mutant(
        "tensors: what is mapped over changes places with the first axis",
        "vmap",
        "src/linattn/torch/_ops.py",
        "            x = x.movedim(axis, at)\n",
        "            x = x.transpose(axis, at)\n",
        torch("compile", "the_operator_under_vmap"),
    ),
    Mutant(
        "tensors: a batch of gradients is taken for one",
        "vmap",
        "src/linattn/torch/_direct.py",
        "    return _transforms() or any(",
        "    return any(",
        torch("compile", "many_gradients_at_once"),
    ),
    Mutant(
        "tensors: pairs above the diagonal of a closed form stay",
        "fault 8",
        "src/linattn/torch/_closed.py",
        "device=self.q.device).tril()",
        "device=self.q.device)",
        torch("closed_forms", "with_everything"),
    ),
    Mutant(
        "tensors: masked keys stay in the sums of a closed form",
        "fault 5",
        "src/linattn/torch/_closed.py",
        "            phi = torch.where(kept.unsqueeze(-1), phi, 0.0)",
        "            phi = phi * 1.0",
        torch("closed_forms", "with_everything"),
    ),
    Mutant(
        "tensors: a closed form's chunks forget the state given",
        "fault 13",
        "src/linattn/torch/_closed.py",
        "narrow = _narrow(sums, piece) if piece.seen or rows.start else None",
        "narrow = _narrow(sums, piece) if rows.start else None",
        torch("closed_forms", "with_everything"),
    ),
    Mutant(
        "tensors: the normaliser of a closed form has no gradient",
        "fault 15",
        "src/linattn/torch/_closed.py",
        "dden = -(by * out",
        "dden = 0 * (by * out",
        torch("closed_forms", "gradcheck_of_options"),
    ),
    Mutant(
        "the fast path of encoder layers takes a swapped layer for softmax attention",
        "linearize_",
        "src/linattn/torch/_layers.py",
        "    _qkv_same_embed_dim = False\n",
        "    _qkv_same_embed_dim = True\n",
        torch("linearize", "encoder_layer", "encoder"),
    ),
    Mutant(
        "a swapped layer answers the fast path as the old one did",
        "linearize_",
        "src/linattn/torch/_linearize.py",
        '    new.__dict__.pop("_qkv_same_embed_dim", None)  # the class has its own\n',
        "",
        torch("linearize", "encoder_layer", "encoder"),
    ),
    # -- states, checks, import -------------------------------------------------------------------
    Mutant(
        "copies of a state share their sums",
        "fault 14",
        "src/linattn/state.py",
        "return State(self.kv.copy(), self.k_sum.copy(), log_scale,",
        "return State(self.kv, self.k_sum.copy(), log_scale,",
        faults("14_branches_of_a_state"),
    ),
    Mutant(
        "a saved state has no scales",
        "law 5",
        "src/linattn/state.py",
        '        if self.log_scale is not None:\n            named["log_scale"] = self.log_scale\n',
        "",
        laws("continuation"),
    ),
    Mutant(
        "a mask of numbers is taken as it is",
        "fault 23",
        "src/linattn/_check.py",
        "    if mask.dtype != bool:\n",
        "    if mask.dtype == object:\n",
        faults("23_masks"),
    ),
    Mutant(
        "a mask (B, n) aligns with heads",
        "fault 23",
        "src/linattn/_check.py",
        "    n_k, full = k_shape[-2], k_shape[:-1]\n",
        "    n_k, full = k_shape[-2], k_shape[1:-1]\n",
        faults("23_masks"),
    ),
    Mutant(
        "causal lengths that differ are no error",
        "fault 11",
        "src/linattn/_check.py",
        "    if causal and q",
        "    if not causal and causal and q",
        faults("11_causal_lengths_that_differ"),
    ),
    Mutant(
        "half precisions promote to the wider range's",
        "law 13",
        "src/linattn/_check.py",
        "if a != b else np.dtype(np.float32)",
        "if a != b else best",
        laws("dtype_promotes"),
    ),
    Mutant(
        "the plan prefers the dearer order",
        "fault 24",
        "src/linattn/plan.py",
        "    return 2 * queries * n_k * (width + d_v) < (n_k + queries)",
        "    return 2 * queries * n_k * (width + d_v) > (n_k + queries)",
        faults("24_the_crossover_is_printable"),
    ),
    Mutant(
        "a call forgets what making features takes",
        "fault 24",
        "src/linattn/attention.py",
        "d_k, d_v, D, found.row_operations(d_k), call.groups",
        "d_k, d_v, D, 0, call.groups",
        ("tests/test_closed_forms.py::test_a_call_goes_by_what_making_features_takes",),
    ),
    Mutant(
        "without the compiled core the import fails",
        "fault 28",
        "src/linattn/backends/native.py",
        '        if os.environ.get("LINATTN_REQUIRE_NATIVE", "0") not in ("", "0"):\n',
        "        if True:\n",
        ("tests/test_imports.py::test_without_the_core_one_notice",),
    ),
    Mutant(
        "the import needs an optional package",
        "fault 29",
        "src/linattn/plan.py",
        "import operator\n",
        "import operator\n\nimport ml_dtypes\n",
        (
            "tests/test_imports.py::test_core_needs_numpy_alone",
            "tests/test_imports.py::test_import_is_silent_and_brings_numpy_alone",
        ),
    ),
    Mutant(
        "the import prints",
        "fault 29",
        "src/linattn/__init__.py",
        "__all__ = [",
        'print("linattn")\n__all__ = [',
        ("tests/test_imports.py::test_import_is_silent_and_brings_numpy_alone",),
    ),
]  # fmt: skip


class Copy:
    """A copy of the tree with its own build, and a Python that imports linattn from it."""

    def __init__(self, folder: Path, isa: str) -> None:
        self.tree, self.build, environment = folder / "tree", folder / "build", folder / "python"
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        # A bare environment that reaches this one's packages by their path. So no hook of an
        # editable install runs, which would bring the package that is installed.
        venv.create(environment, symlinks=os.name != "nt")
        paths = {"base": str(environment), "platbase": str(environment)}
        packages = sysconfig.get_path("purelib", "venv", paths)
        here = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        Path(packages, "copy.pth").write_text("\n".join([str(self.tree / "src"), *here]))
        scripts = Path(sysconfig.get_path("scripts", "venv", paths))
        self.python = str(scripts / Path(sys.executable).name)
        self.clean: bytes | None = None
        tools = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        self.environ = {**os.environ, "PATH": os.pathsep.join(tools)}
        self.run(
            "cmake", "-G", "Ninja", "-S", self.tree, "-B", self.build, "-DLINATTN_BUILD_PYTHON=ON",
            f"-DLINATTN_ISA_SETS={isa}", f"-DPython_EXECUTABLE={sys.executable}",
        )  # fmt: skip

    def run(self, *command: object) -> None:
        done = subprocess.run(
            [str(c) for c in command], env=self.environ, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}")

    def compile(self) -> bytes:
        """The extension as the copy's sources make it."""
        self.run("cmake", "--build", self.build, "--target", "_native")
        (extension,) = self.build.glob("_native*.so")
        return extension.read_bytes()

    def install(self, extension: bytes) -> None:
        to = self.tree / "src" / "linattn" / "_native.abi3.so"
        to.unlink(missing_ok=True)  # a new file, as the loader may have mapped the old one
        to.write_bytes(extension)

    def test(self, tests: tuple[str, ...], serving: str, limit: float) -> str:
        """The first test that fails, or ""."""
        environ = {**os.environ, "LINATTN_REQUIRE_NATIVE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        for name in ("LINATTN_TEST_NATIVE", "LINATTN_ISA", "LINATTN_BACKEND", "PYTHONPATH"):
            environ.pop(name, None)
        command = [self.python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-rfE"]
        command += ["-k", serving] if serving else []
        try:
            done = subprocess.run(
                [*command, *tests], cwd=self.tree, env=environ, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, timeout=limit,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no end after {limit:.0f} s"
        if done.returncode == 0:
            return ""
        if done.returncode < 0:
            return f"the process died of signal {-done.returncode}"
        failed = re.search(
            r"^(?:FAILED|ERROR) tests/(\S+\.py(?:::\w+(?:\[[^\n]*?\])?)?)", done.stdout, re.M
        )
        if done.returncode != 1 or not failed:
            raise SystemExit(f"{' '.join(command + list(tests))}\n{done.stdout}")
        return failed[1]

    def caught(self, mutant: Mutant, limit: float) -> str:
        """The test that sees the mutant, or ""."""
        file = found(self.tree, mutant)
        before = file.read_text("utf-8")
        file.write_text(before.replace(mutant.old, mutant.new), "utf-8")
        try:
            native = mutant.serving == CORE
            self.install(self.compile() if native else self.clean)
            return self.test(mutant.tests, mutant.serving, limit)
        finally:
            file.write_text(before, "utf-8")


def found(tree: Path, mutant: Mutant) -> Path:
    """The file that the mutant breaks."""
    count = {path: path.read_text("utf-8").count(mutant.old) for path in tree.glob(mutant.file)}
    if sum(count.values()) != 1:
        raise SystemExit(
            f"{mutant.name}: expected once in {mutant.file}, found {sum(count.values())} times; "
            f"adapt the mutant to the sources:\n{mutant.old}"
        )
    return next(path for path, n in count.items() if n)


def write(results: list[tuple[Mutant, str]]) -> None:
    lines = ["| what is broken | where | offends | caught by |", "|---|---|---|---|"]
    for mutant, test in results:
        file = found(ROOT, mutant).relative_to(ROOT).as_posix().removeprefix("src/linattn/")
        lines.append(f"| {mutant.name} | `{file}` | {mutant.subject} | `{test or 'nothing'}` |")
    begin, end = "<!-- mutants -->\n", "\n<!-- end -->"
    head, _, rest = PAGE.read_text("utf-8").partition(begin)
    tail = rest.partition(end)[2]
    PAGE.write_text(head + begin + "\n" + "\n".join(lines) + "\n" + end + tail, "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of names or subjects; law-4 is law 4 alone")
    parser.add_argument("--isa", default="avx2", help="instruction set to build (avx2)")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--write", action="store_true", help="the table, into docs/mutations.md")
    parser.add_argument("--trust", action="store_true", help="they pass without a mutant")
    parser.add_argument(
        "--limit", type=float, default=400, help="seconds for the tests of one (400)"
    )
    o = parser.parse_args()
    words = [re.compile(rf"\b{re.escape(word.replace('-', ' '))}\b", re.I) for word in o.words]
    chosen = [
        m for m in MUTANTS if not words or any(w.search(f"{m.name}, {m.subject}") for w in words)
    ]
    for mutant in chosen:  # before the long work
        found(ROOT, mutant)
    if o.list or not chosen:
        print(*(f"{m.subject}: {m.name}" for m in chosen), sep="\n")
        return 0 if chosen else 2
    with tempfile.TemporaryDirectory(prefix="linattn-mutations-") as folder:
        copy = Copy(Path(folder), o.isa)
        copy.clean = copy.compile()
        copy.install(copy.clean)
        for serving in (CORE, ARRAY, PYTHON):
            tests = dict.fromkeys(t for m in chosen if m.serving == serving for t in m.tests)
            known = o.trust or not tests
            failed = "" if known else copy.test(tuple(tests), serving, 10 * o.limit)
            if failed:
                raise SystemExit(f"{failed} fails without any mutant")
        results = []
        for mutant in chosen:
            start = time.monotonic()
            test = copy.caught(mutant, o.limit)
            results.append((mutant, test))
            print(
                f"{'red' if test else 'GREEN':5} {time.monotonic() - start:4.0f} s  "
                f"{mutant.subject}: {mutant.name}  [{test}]",
                flush=True,
            )
    alive = [mutant.name for mutant, test in results if not test]
    print(f"{len(results) - len(alive)} of {len(results)} mutants were caught", *alive, sep="\n  ")
    if o.write:
        write(results)
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
