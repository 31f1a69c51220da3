//! What a rank will allocate, before it does.

use std::fmt;

/// Device memory of one rank, buffer by buffer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Receive rows of the budget.
    pub budget_rows: u32,
    /// Receive rows of the worst routing.
    pub worst_case_rows: u32,
    /// The buffers.
    pub entries: Vec<MemoryEntry>,
}

/// One buffer, or several of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryEntry {
    /// What it holds.
    pub label: &'static str,
    /// Bytes at the budget.
    pub budget: u64,
    /// Bytes if the budget were the worst case.
    pub worst_case: u64,
}

impl MemoryReport {
    pub(crate) fn new(budget_rows: u32, worst_case_rows: u32) -> Self {
        Self { budget_rows, worst_case_rows, entries: Vec::new() }
    }

    /// A buffer that does not depend on routing.
    pub(crate) fn fixed(&mut self, label: &'static str, bytes: usize) {
        let bytes = bytes as u64;
        self.entries.push(MemoryEntry { label, budget: bytes, worst_case: bytes });
    }

    /// A buffer of so many bytes a receive row.
    pub(crate) fn rows(&mut self, label: &'static str, row_bytes: usize) {
        let bytes = |rows: u32| row_bytes as u64 * u64::from(rows);
        self.entries.push(MemoryEntry {
            label,
            budget: bytes(self.budget_rows),
            worst_case: bytes(self.worst_case_rows),
        });
    }

    /// Bytes at the budget.
    pub fn budget_bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.budget).sum()
    }

    /// Bytes if the budget were the worst case.
    pub fn worst_case_bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.worst_case).sum()
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<28} {:>16} {:>16}",
            "bytes of one rank",
            format!("{} rows", self.budget_rows),
            format!("{} rows", self.worst_case_rows)
        )?;
        for entry in &self.entries {
            writeln!(f, "{:<28} {:>16} {:>16}", entry.label, entry.budget, entry.worst_case)?;
        }
        write!(f, "{:<28} {:>16} {:>16}", "total", self.budget_bytes(), self.worst_case_bytes())
    }
}
