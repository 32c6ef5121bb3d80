#pragma once
#include "blas.h"
