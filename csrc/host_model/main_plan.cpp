// SPDX-License-Identifier: Apache-2.0
// Random shapes on random devices: main_plan SEED fails at the first whose pieces are not each pair
// of a tile and a sample once, or whose finishing kernel would not read what they leave.
#define GNSFAST_HOST_MODEL
#include "../finish.cuh"

#include <set>

using namespace gnsfast;
using host_model::fail;

void check_pieces(const Problem& p, int clusters) {
  const Plan& plan = p.plan;
  const int none = -1, whole = -2;
  std::vector<std::vector<int>> slots(plan.tiles, std::vector<int>(p.B, none));
  std::set<int> used;
  int most = 0;
  for (int cluster = 0; cluster < clusters; ++cluster) {
    int samples = 0;
    for (Walk walk{cluster}; walk.next(p, clusters);) {
      const Piece& piece = walk.piece;
      if (piece.slot >= 0 && !used.insert(piece.slot).second) fail("two parts share a slot");
      if (piece.slot >= plan.slots() / plan.tile.cluster) fail("a slot beyond the scratch");
      if ((piece.slot >= 0) != (piece.tile >= plan.whole_tiles)) fail("a part of a whole tile");
      for (int b = piece.begin; b < piece.end; ++b, ++samples) {
        if (slots[piece.tile][b] != none) fail("a sample of a tile twice");
        slots[piece.tile][b] = piece.slot < 0 ? whole : piece.slot;
      }
    }
    most = std::max(most, samples);
  }
  if (most != plan.busiest(p.B)) fail("another number of samples for the busiest cluster");
  for (int tile = 0; tile < plan.tiles; ++tile) {
    std::vector<int>& found = slots[tile];
    if (std::count(found.begin(), found.end(), none)) fail("a sample of a tile left out");
    if (tile < plan.whole_tiles) continue;
    const int cut = tile - plan.whole_tiles;
    std::vector<int> read{cut};
    const Helpers helpers = helpers_of(p, cut);
    for (int h = helpers.begin; h < helpers.end; ++h) read.push_back(slot_of(plan, cut, h));
    found.erase(std::unique(found.begin(), found.end()), found.end());
    if (found != read) fail("other parts are added than were left");
  }
}

void check_tasks(const Problem& p) {
  const Tasks& t = p.tasks;
  const int64_t tokens = static_cast<int64_t>(t.chunks) * t.tokens;
  const int64_t samples = static_cast<int64_t>(t.pieces / t.chunks) * t.samples;
  if (tokens < p.T || tokens - t.tokens >= p.T) fail("chunks that are not a sample's tokens");
  if (samples < p.B || samples - t.samples >= p.B) fail("pieces that are not all samples");
  if (t.pieces > kPieces) fail("many pieces for one block to add");
  if (t.chunks > 1 && (t.samples > 1 || t.warps < kFinishWarps)) fail("chunks of several samples");
  if (t.samples % (kFinishWarps / t.warps)) fail("warps without a sample");
}

int main(int count, char** arguments) {
  std::mt19937 random(count > 1 ? atoi(arguments[1]) : 1);
  auto upto = [&](int most) { return std::uniform_int_distribution<int>(1, most)(random); };
  int cut = 0;
  constexpr int kShapes = 20000;
  for (int k = 0; k < kShapes; ++k) {
    const Tile tile = k % 2 ? Tile{128, 192, 2} : Tile{128, 128, 1};
    const int at_once = upto(k % 3 ? 12 : 160), B = upto(k % 5 ? 20 : 1500);
    const int T = upto(k % 7 ? 100 : 5000), I = upto(800), O = upto(1500);
    const Plan plan = plan_tiles(tile, B, T, I, O, at_once * tile.cluster);
    const Problem p = problem_of(B, T, I, O, false, plan, true, nullptr);
    check_pieces(p, std::min(units_of(plan), at_once));
    check_tasks(p);
    cut += plan.helpers > 0;
  }
  printf("%d shapes, %d of them cut  ok\n", kShapes, cut);
  return 4 * cut < kShapes;
}
