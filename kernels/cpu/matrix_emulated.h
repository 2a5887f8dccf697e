// The matrix unit's instructions one number after the other, for tests on CPUs that have none (matrix.h includes this).
struct Tiles {
  alignas(64) char bytes[8][TILE_ROWS][TILE_BYTES];
  TileShapes shapes;
};
inline thread_local Tiles tiles_of_thread;

inline void set_shapes(const TileShapes& shapes) {
  std::memset(&tiles_of_thread, 0, sizeof tiles_of_thread);
  tiles_of_thread.shapes = shapes;
}
inline void release_tiles() { set_shapes(TileShapes()); }

template <int TILE>
inline void tile_zero() {
  std::memset(tiles_of_thread.bytes[TILE], 0, TILE_ROWS * TILE_BYTES);
}
template <int TILE>
inline void tile_load(const char* from, long stride) {
  Tiles& all = tiles_of_thread;
  tile_zero<TILE>();
  for (int r = 0; r < all.shapes.rows[TILE]; r++)
    std::memcpy(all.bytes[TILE][r], from + r * stride, all.shapes.row_bytes[TILE]);
}
template <int TILE>
inline void tile_store(char* to, long stride) {
  const Tiles& all = tiles_of_thread;
  for (int r = 0; r < all.shapes.rows[TILE]; r++)
    std::memcpy(to + r * stride, all.bytes[TILE][r], all.shapes.row_bytes[TILE]);
}

struct DotBf16 {
  template <int SUM, int A, int B>
  static void accumulate() {
    Tiles& all = tiles_of_thread;
    for (int r = 0; r < all.shapes.rows[SUM]; r++) {
      vf even = zero(), odd = zero();
      for (int unit = 0; unit < all.shapes.rows[B]; unit++) {
        const vi high = set1i(0xffff0000u), x = broadcast_unit(all.bytes[A][r] + unit * 4);
        const vi w = loadi(all.bytes[B][unit]);
        even = fma(asf(shl16(x)), asf(shl16(w)), even);
        odd = fma(asf(andi(x, high)), asf(andi(w, high)), odd);
      }
      float* to = (float*)all.bytes[SUM][r];
      storef(to, add(loadf(to), add(even, odd)));
    }
  }
};

struct DotBytes {
  template <int SUM, int A, int B>
  static void accumulate() {
    Tiles& all = tiles_of_thread;
    for (int r = 0; r < all.shapes.rows[SUM]; r++)
      for (int column = 0; column < TILE_BYTES / 4; column++) {
        int32_t total;
        std::memcpy(&total, &all.bytes[SUM][r][column * 4], 4);
        for (int k = 0; k < TILE_BYTES; k++)
          total += (int8_t)all.bytes[A][r][k] * (uint8_t)all.bytes[B][k / 4][column * 4 + k % 4];
        std::memcpy(&all.bytes[SUM][r][column * 4], &total, 4);
      }
  }
};
