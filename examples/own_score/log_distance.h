// The logarithmic bias of KERPLE (arXiv:2205.09921): -slope log(1 + |p_i - j|), in the place of ALiBi's.
#pragma once
#include <cmath>

#include "flash.h"

namespace minimal_attn {

// What a score gets by the distance p_i - j of its query and key; `slope` is the head's of alibi_slopes.
MINIMAL_ATTN_HOST_DEVICE inline float term_of_distance(float slope, float distance) {
    return -slope * logf(1.f + fabsf(distance));
}

}  // namespace minimal_attn
