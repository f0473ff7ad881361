//! Whether the kernel can accelerate TCP, for people.

use sinabro_common::api::{SelfTestReport, Verdict};

/// In one line.
pub fn line(report: &SelfTestReport) -> String {
    let verdict = match report.verdict {
        Verdict::Accelerate => "possible",
        Verdict::Refused => "refused",
    };
    format!("{verdict}: {}", report.reason)
}
