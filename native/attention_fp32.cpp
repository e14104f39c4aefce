// Attention in fp32 arithmetic, for operands of any dtype.
#include "attention_kernels.h"

#include "attention_pass.h"

namespace rooftile {
namespace ROOFTILE_ISA {

const AttentionPass forward_fp32 = forward_pass<Fp32Engine>();
const AttentionGradientPass backward_fp32 = backward_pass<Fp32Engine>();

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
