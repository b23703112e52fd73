"""The demonstration: two caches race over one long document. It uses what ``hf_sparsekv`` offers to everybody."""
