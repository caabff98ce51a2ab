// tile.cuh -- what K and V are taken by.
#pragma once

constexpr int kTile = PA_TILE;    // tokens
