/// What the merges of a prefill decided: enough to make the slots again, and to differentiate them.
#pragma once
#include "nearfar/merge.h"

namespace {

/// One merge, as floats: where each slot went, its log-weight, and the mean query that this is relative to.
struct MergeRecord {
  float *place, *weight, *anchor;  // (rows), (rows), (D)

  /// Of the merge that a head does as it enters one of the blocks of a call.
  MergeRecord(const NearFarCall& c, int64_t head, int64_t block) {
    place = c.merges + (head * c.merge_blocks + block) * (2 * c.merge_rows + c.dim);
    weight = place + c.merge_rows;
    anchor = weight + c.merge_rows;
  }
};

/// Writes down a merge of n slots that has just been done.
inline void record_merge(const NearFarCall& c, int64_t head, int64_t block, int64_t n, const Metric& m,
                         const MergeScratch& s) {
  const MergeRecord to(c, head, block);
  for (int64_t i = 0; i < n; ++i) to.place[i] = float(s.place[i]), to.weight[i] = s.weight[i];
  copy_row(to.anchor, m.anchor, c.dim);
}

}  // namespace
