// A table of HierarchicalKV, by functions of C, for `device_lookup.py`. Its headers are given by a path, and are no part of this.
#include <merlin_hashtable.cuh>

using Table = nv::merlin::HashTable<int64_t, float, uint64_t>;

extern "C" Table* hkv_open(size_t capacity, size_t dim) {
  nv::merlin::HashTableOptions options;
  options.init_capacity = capacity;
  options.max_capacity = capacity;
  options.max_hbm_for_vectors = 2 * capacity * dim * sizeof(float);
  options.dim = dim;
  Table* table = new Table();
  table->init(options);
  return table;
}

extern "C" void hkv_insert(Table* table, size_t n, const int64_t* keys, const float* vectors) {
  table->insert_or_assign(n, keys, vectors);
  cudaDeviceSynchronize();
}

extern "C" void hkv_find(Table* table, size_t n, const int64_t* keys, float* vectors, bool* found) {
  table->find(n, keys, vectors, found);
}

extern "C" void hkv_close(Table* table) { delete table; }
