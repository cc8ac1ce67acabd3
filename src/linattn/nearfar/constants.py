"""Numbers that several files of near/far attention share. The native engine has the same ones in csrc/nearfar."""

HIDDEN = -1e30  # logit of a hidden key; finite, so that a row without visible keys is not NaN

# The merging rule: csrc/nearfar/merge.h and prefill.h must agree.
CANDIDATES = 128  # at least so many slots, or twice as many as have to go, are considered for merging
SEARCHED = 256  # heads with at least so many slots search for single keys: none of their slots counts as unimportant
SEARCHED_CANDIDATES = 256  # in these heads: so many are considered, because most have about the same weight
EVEN_WEIGHT = 4.0  # in these heads: what is added to every slot's weight, in units of the mean weight
RIDGE = 1e-4  # times the mean variance of the queries, added to the diagonal of their covariance
LEAST_VARIANCE = 1e-12  # of the queries, for the ridge
LARGEST_LOG_WEIGHT = 46.0  # of the importance in the cost of a pair: exp(46) is 1e20
TINY = 1e-30  # the least importance of a slot, relative to the largest; also keeps divisors positive

DECAY = 0.95  # of the attention that was received, for each further block

# Recall: csrc/nearfar/recall.h must agree.
LEAST_WEIGHT = 1e-3  # of a row, that one key of a recalled block must have; lighter blocks stay in the slots
