//! What ranks have to know of each other before they make a communicator.

use graph_ep::Rank;
use graph_ep::ep_context::rendezvous::RendezvousError;

use super::error::NcclError;
use super::library::UniqueId;

/// What a rank tells the others.
pub(super) struct Card {
    pub(super) gpu: u32,
    /// Of rank 0; zeros on the others.
    pub(super) id: UniqueId,
}

impl Card {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        [&self.gpu.to_le_bytes()[..], &self.id.0].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (gpu, id) = bytes.split_first_chunk::<4>()?;
        Some(Self { gpu: u32::from_le_bytes(*gpu), id: UniqueId(id.try_into().ok()?) })
    }
}

/// The id of the communicator, if every rank has a GPU of its own. The same on every rank.
pub(super) fn meet(cards: &[Vec<u8>]) -> Result<UniqueId, NcclError> {
    let mut read = Vec::with_capacity(cards.len());
    for (rank, bytes) in cards.iter().enumerate() {
        let rank = Rank::from_index(rank);
        let card = Card::from_bytes(bytes).ok_or_else(|| RendezvousError::Malformed {
            rank,
            purpose: "NCCL's id".to_owned(),
            reason: format!("{} bytes are not {}", bytes.len(), 4 + 128),
        })?;
        if let Some(first) = read.iter().position(|other: &Card| other.gpu == card.gpu) {
            let first = Rank::from_index(first);
            return Err(NcclError::SharedGpu { first, second: rank, gpu: card.gpu });
        }
        read.push(card);
    }
    let zeros = UniqueId([0; 128]);
    Ok(read.first().map_or(zeros, |card| card.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(gpu: u32, id: u8) -> Vec<u8> {
        Card { gpu, id: UniqueId([id; 128]) }.to_bytes()
    }

    #[test]
    fn the_id_is_that_of_rank_0() {
        let id = meet(&[card(0, 7), card(1, 0), card(5, 0)]).map(|id| id.0).expect("they meet");
        assert_eq!(id, [7; 128]);
    }

    #[test]
    fn ranks_that_share_a_gpu_are_named() {
        let error = meet(&[card(0, 7), card(1, 0), card(0, 0)]).map(drop).expect_err("they share");
        assert!(matches!(error, NcclError::SharedGpu { first: Rank(0), second: Rank(2), gpu: 0 }));
        assert!(error.to_string().contains("rank 0 and rank 2 share GPU 0"), "{error}");
    }

    #[test]
    fn what_is_no_card_is_refused() {
        for length in [0, 3, 4, 131, 133] {
            let error = meet(&[card(0, 7), vec![0; length]]).map(drop).expect_err("no card");
            let NcclError::Rendezvous(RendezvousError::Malformed { rank, .. }) = error else {
                panic!("{error}")
            };
            assert_eq!(rank, Rank(1));
        }
    }
}
