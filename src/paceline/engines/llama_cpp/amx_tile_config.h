// For compilers whose own header says that ldtilecfg reads 8 bytes of its 64 (some GCC 11 to 13), so that they leave out
// writing the others. To be included before all else: c++ -include amx_tile_config.h
#pragma once
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC system_header
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%0" : : "m"(*(const char(*)[64])(config)))
// What was compiled with this says so, where it also says by which compiler: see native.py.
#ident "paceline: whole AMX tile configurations"
#endif
