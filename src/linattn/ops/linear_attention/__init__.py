"""Linear attention, the sums S and Z of kernel features: the O(N^2) definition and the chunked form."""
