// x * sigmoid(slope * x + cubic * x^3) as loops of a processor compute it: device/bias_activation.h has the formula and
// says of which activations. Maxima, minima and magnitudes are instructions there; choices between two results are not.
#pragma once
#include <cmath>

#include "device/exponential.h"
#include "host/multi_tensor_tiles.h"

namespace apex {
// Slope and cubic not below 0: the sigmoid's argument has the sign of x. As exact as Math.
template <class Math> struct SigmoidActivation {
  Math slope, cubic;

  template <class Arguments>
  APEX_INLINE explicit SigmoidActivation(const Arguments& a) : slope(Math(a.slope)), cubic(Math(a.cubic)) {}

  // f(x), and with `derivative` f'(x) beside it. x is held where exp stays in range: f goes to 0 there, or to x. A nan
  // stays.
  template <bool derivative> APEX_INLINE Math value(Math x, Math& slope_there) const {
    constexpr Math most = sizeof(Math) == 8 ? Math(700) : Math(87);
    const Math magnitude = std::fabs(x), near = most < magnitude ? most : magnitude, square = near * near;
    // What the sigmoid of |x| is short of 1, which is that of -|x|: at most a half, and so are its roundings.
    const Math e = gpu::exp_of_negative(-(near * gpu::fma(cubic, square, slope))), part = e / (Math(1) + e);
    if constexpr (derivative) {
      // f'(-x) = 1 - f'(x)
      const Math steep = part * (Math(1) - part) * gpu::fma(Math(3) * cubic, square, slope);
      const Math below = gpu::fma(-near, steep, part);
      slope_there = x < Math(0) ? below : Math(1) - below;
    }
    return gpu::fma(-near, part, x < Math(0) ? Math(0) : x);
  }
  APEX_INLINE Math operator()(Math x) const {
    Math unused;
    return value<false>(x, unused);
  }
};
}  // namespace apex
