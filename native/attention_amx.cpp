// Attention on AMX tiles, and on the same tiles in plain C++ where ROOFTILE_AMX is not defined.
#include "attention_kernels.h"

#include "attention_amx.h"
#include "attention_pass.h"

namespace rooftile {
namespace ROOFTILE_ISA {
namespace {

#if defined(ROOFTILE_AMX)
using Tiles = AmxTiles;
#else
using Tiles = SoftwareTiles;
#endif

}  // namespace

const AttentionPass forward_bf16 = forward_pass<TileEngine<Tiles, 1>>();
const AttentionPass forward_fp16 = forward_pass<TileEngine<Tiles, 2>>();
const AttentionPass forward_fp32 = forward_pass<TileEngine<Tiles, 3>>();
const AttentionGradientPass backward_bf16 = backward_pass<TileEngine<Tiles, 1>>();
const AttentionGradientPass backward_fp16 = backward_pass<TileEngine<Tiles, 2>>();
const AttentionGradientPass backward_fp32 = backward_pass<TileEngine<Tiles, 3>>();

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
