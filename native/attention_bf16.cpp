// Attention on bf16 operands with bf16 products (vdpbf16ps) and fp32 sums.
#include "attention_kernels.h"

#include "attention_pass.h"

namespace rooftile {
namespace ROOFTILE_ISA {

const AttentionPass forward_bf16 = forward_pass<Bf16Engine>();
const AttentionGradientPass backward_bf16 = backward_pass<Bf16Engine>();

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
