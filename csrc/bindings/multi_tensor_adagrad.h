#pragma once
#include "generated/multi_tensor_adagrad.h"

inline void apex::MultiTensorAdagrad::check() const { check_decay_mode(*this); }
