//! What happens when routing overflows the receive budget: agree, grow, record again, replay.
