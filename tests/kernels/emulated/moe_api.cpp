// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The op of routed experts, run by the emulator: returns null, or the fault.
#include "exl3/launch/moe.h"
#include "tests/kernels/emulated/session.h"

using namespace exl3;

extern "C" {

struct MoeCall {
  const void* x;
  const void* topk_ids;
  const void* topk_weights;
  const void* w13;
  const void* w2;
  const void* experts;
  const void* suh13;
  const void* svh13;
  const void* suh2;
  const void* svh2;
  const void* expert_map;
  void* out;
  int64_t w13_bytes, w2_bytes;
  int32_t type, wide_ids, tokens, width, top_k, hidden, intermediate;
  int32_t local_experts, slices, routed_experts;
  float limit;
  int32_t block_rows, gate_up_splits, down_splits;
};

const char* emulated_moe(const MoeCall* call, Run* run) {
  return faults_of([&] {
    MoeParams p{};
    p.x = call->x;
    p.topk_ids = call->topk_ids;
    p.topk_weights = static_cast<const float*>(call->topk_weights);
    p.expert_map = static_cast<const int32_t*>(call->expert_map);
    p.w13 = static_cast<const uint16_t*>(call->w13);
    p.w2 = static_cast<const uint16_t*>(call->w2);
    p.experts = static_cast<const int64_t*>(call->experts);
    p.suh13 = static_cast<const uint16_t*>(call->suh13);
    p.svh13 = static_cast<const uint16_t*>(call->svh13);
    p.suh2 = static_cast<const uint16_t*>(call->suh2);
    p.svh2 = static_cast<const uint16_t*>(call->svh2);
    p.out = call->out;
    p.type = static_cast<ElementType>(call->type);
    p.wide_ids = call->wide_ids != 0;
    p.tokens = call->tokens;
    p.width = call->width;
    p.top_k = call->top_k;
    p.hidden = call->hidden;
    p.intermediate = call->intermediate;
    p.local_experts = call->local_experts;
    p.slices = call->slices;
    p.routed_experts = call->routed_experts;
    p.limit = call->limit;
    const MoePlan plan{call->block_rows, call->gate_up_splits, call->down_splits};
    const size_t bytes = moe_workspace_bytes(p, plan);
    // Aligned as on a device; no vector promises that.
    std::vector<char> memory(bytes + 256, static_cast<char>(0xff));
    auto address = reinterpret_cast<uintptr_t>(memory.data());
    char* at = memory.data() + ((address + 255) / 256 * 256 - address);
    clear_head(at);
    lay_out_workspace(p, plan, at);

    const size_t pairs = p.pairs();
    const size_t virtual_experts = size_t(p.local_experts) * p.slices;
    const size_t slices = p.slices;
    const Session session(*run);
    session.read("x", p.x, bytes_of(p.type) * p.tokens * p.width);
    session.read("topk_ids", p.topk_ids, pairs * (p.wide_ids ? 8 : 4));
    session.read("topk_weights", p.topk_weights, pairs * 4);
    session.read("expert_map", p.expert_map, size_t(p.routed_experts) * 4);
    session.read("w13", p.w13, call->w13_bytes);
    session.read("w2", p.w2, call->w2_bytes);
    session.read("experts", p.experts, virtual_experts * 9 * 8);
    session.read("suh13", p.suh13, virtual_experts * 2 * p.hidden * 2);
    session.read("svh13", p.svh13, virtual_experts * 2 * p.intermediate * 2);
    session.read("suh2", p.suh2, virtual_experts * p.intermediate * 2);
    session.read("svh2", p.svh2, virtual_experts * p.hidden * 2);
    session.write("out", p.out, bytes_of(p.type) * p.tokens * p.width);
    add_head(session, at);
    session.write("counts", p.counts, size_t(p.local_experts) * 4);
    session.write("totals", p.totals, sizeof(MoeTotals));
    session.write("tiles", p.tiles, p.max_tiles * sizeof(MoeTile));
    session.write("row_pair", p.row_pair, pairs * 4);
    session.write("row_expert", p.row_expert, pairs * 4);
    session.write("pair_row", p.pair_row, pairs * 4);
    session.write("rotated", p.rotated, slices * 2 * pairs * p.hidden * 2);
    session.write("activated", p.activated, slices * pairs * p.intermediate * 2);
    session.write("products", p.products, slices * pairs * p.hidden * 4);
    auto* parts = reinterpret_cast<char*>(p.parts);
    session.write("parts", parts, static_cast<size_t>(at + bytes - parts));
    for (int i = 0; i < run->launches; ++i) moe(p, plan, at, nullptr);
    read_head(at, *run);
  });
}

}  // extern "C"
