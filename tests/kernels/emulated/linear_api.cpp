// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The dense ops, run by the emulator: each function returns null, or the fault.
#include "exl3/launch/dequantize.h"
#include "exl3/launch/linear.h"
#include "exl3/launch/transform.h"
#include "tests/kernels/emulated/session.h"

using namespace exl3;

extern "C" {

struct LinearCall {
  const void* x;
  const void* trellis;
  const void* suh;
  const void* svh;
  const void* bias;
  void* out;
  int64_t trellis_bytes;
  int32_t type, rows, width, k;
  int32_t num_shards;
  const int32_t* shards;  // [num_shards, 5]: stored n, skip, keep, words, codebook
  int32_t block_rows, splits, unrounded;
};

const char* emulated_linear(const LinearCall* call, Run* run) {
  return faults_of([&] {
    LinearArguments a{};
    a.x = call->x;
    a.trellis = static_cast<const uint16_t*>(call->trellis);
    a.suh = static_cast<const uint16_t*>(call->suh);
    a.svh = static_cast<const uint16_t*>(call->svh);
    a.bias = call->bias;
    a.out = call->out;
    a.type = static_cast<ElementType>(call->type);
    a.rows = call->rows;
    a.width = call->width;
    a.k = call->k;
    size_t stored = 0;
    size_t kept = 0;
    for (int i = 0; i < call->num_shards; ++i) {
      const int32_t* s = call->shards + 5 * i;
      a.shards.push_back({s[0], s[1], s[2], s[3], static_cast<Codebook>(s[4])});
      stored += s[0];
      kept += s[2];
    }
    const LinearPlan plan{call->block_rows, call->splits, call->unrounded != 0};
    // The workspace's parts, so that running over an end is a fault.
    const size_t bytes = workspace_bytes(a, plan);
    std::vector<char> workspace(bytes, static_cast<char>(0xff));
    char* at = workspace.data();
    clear_head(at);
    const size_t element = bytes_of(a.type);
    // Unrounded halves and bytes: 4 and 8 bytes of an activation; bytes have a sum of
    // each 64, and a scale of each row.
    const bool integers = plan.unrounded && a.shards[0].codebook == Codebook::kMul1;
    const size_t slab_rows = a.shards.size() * a.rows;
    size_t activations = slab_rows * a.k * (integers ? 8 : plan.unrounded ? 4 : 2);
    if (integers) activations += slab_rows * (a.k / 64 * 4 + 4);
    const Session session(*run);
    session.read("x", a.x, element * a.rows * a.width);
    session.read("trellis", a.trellis, static_cast<size_t>(call->trellis_bytes));
    session.read("suh", a.suh, a.shards.size() * a.k * 2);
    session.read("svh", a.svh, stored * 2);
    session.read("bias", a.bias, kept * element);
    session.write("out", a.out, element * a.rows * kept);
    add_head(session, at);
    session.write("activations", at + kHeadBytes, activations);
    session.write("parts", at + kHeadBytes + activations,
                  bytes - kHeadBytes - activations);
    for (int i = 0; i < run->launches; ++i) linear(a, plan, at, nullptr);
    read_head(at, *run);
  });
}

struct DequantizeCall {
  const void* trellis;
  const void* suh;
  const void* svh;
  void* out;
  int32_t k, n, words, codebook;
};

const char* emulated_dequantize(const DequantizeCall* call, const Run* run) {
  return faults_of([&] {
    DequantizeParams p{};
    p.trellis = static_cast<const uint16_t*>(call->trellis);
    p.suh = static_cast<const uint16_t*>(call->suh);
    p.svh = static_cast<const uint16_t*>(call->svh);
    p.out = static_cast<float*>(call->out);
    p.k = call->k;
    p.n = call->n;
    const size_t weights = size_t(p.k) * p.n;
    const Session session(*run);
    session.read("trellis", p.trellis, weights / kTileWeights * call->words * 2);
    session.read("suh", p.suh, size_t(p.k) * 2);
    session.read("svh", p.svh, size_t(p.n) * 2);
    session.write("out", p.out, weights * sizeof(float));
    for (int i = 0; i < run->launches; ++i) {
      launch_dequantize(call->words, static_cast<Codebook>(call->codebook), nullptr, p);
    }
  });
}

struct TransformCall {
  const void* x;
  const void* pre;
  const void* post;
  void* out;
  int32_t x_type, out_type, rows, width, k, num_slabs;
};

const char* emulated_transform(const TransformCall* call, const Run* run) {
  return faults_of([&] {
    TransformParams p{};
    p.x = call->x;
    p.pre = static_cast<const uint16_t*>(call->pre);
    p.post = static_cast<const uint16_t*>(call->post);
    p.out = call->out;
    p.x_type = static_cast<ElementType>(call->x_type);
    p.out_type = static_cast<ElementType>(call->out_type);
    p.rows = call->rows;
    p.width = call->width;
    p.k = call->k;
    p.num_slabs = call->num_slabs;
    p.copies = 1;
    const size_t scales = size_t(p.num_slabs) * p.k * 2;
    const Session session(*run);
    session.read("x", p.x, bytes_of(p.x_type) * p.rows * p.width);
    session.read("pre", p.pre, scales);
    session.read("post", p.post, scales);
    session.write("out", p.out, bytes_of(p.out_type) * p.num_slabs * p.rows * p.k);
    for (int i = 0; i < run->launches; ++i) launch_transform(nullptr, p);
  });
}

// Lines of "file:line kind instructions wavefronts conflicts", of the last run.
const char* emulated_banks() { return last_banks.c_str(); }

}  // extern "C"
