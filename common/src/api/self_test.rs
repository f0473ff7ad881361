//! What the self-test of the TCP acceleration found on a kernel.

use serde::{Deserialize, Serialize};

/// What may be accelerated on this kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// Connections of pods that ask for it. Versions before had a word of their own for kernels on
    /// which applications see no difference.
    #[serde(rename = "someFail", alias = "allPass")]
    Accelerate,
    /// Nothing, also on request: bytes may come in the wrong order, a sender may not be held
    /// back, or it is not known.
    #[default]
    #[serde(rename = "refused")]
    Refused,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SelfTestReport {
    pub verdict: Verdict,
    /// Whether the test was run to its end, so that the verdict is about what was seen.
    #[serde(default)]
    pub tried: bool,
    /// Why the verdict is that, in one line.
    pub reason: String,
    /// Its release.
    pub kernel: String,
    /// Always empty. Versions before list here how calls behave, and do without no list.
    #[serde(default, skip_deserializing)]
    pub rows: [(); 0],
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the first release has it, and writes it.
    const BEFORE: &str = r#"{"verdict": "VERDICT", "reason": "21 of 60 rows differ", "kernel": "6.18.0",
        "rows": [{"id": "splice", "title": "splice(2)", "class": "behaviour", "passed": false,
                  "plain": "5", "accelerated": "EAGAIN", "meaning": "hangs"}]}"#;

    #[test]
    fn reports_of_versions_before_are_understood() {
        for (word, verdict) in [
            ("allPass", Verdict::Accelerate),
            ("someFail", Verdict::Accelerate),
            ("refused", Verdict::Refused),
        ] {
            let text = BEFORE.replace("VERDICT", word);
            let report: SelfTestReport = serde_json::from_str(&text).unwrap();
            assert_eq!((report.verdict, report.tried), (verdict, false));
            assert_eq!(report.reason, "21 of 60 rows differ");
        }
    }

    #[test]
    fn versions_before_understand_reports() {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        enum WordBefore {
            AllPass,
            SomeFail,
            Refused,
        }
        #[derive(Deserialize)]
        struct Before {
            verdict: WordBefore,
            rows: Vec<String>,
        }
        for verdict in [Verdict::Accelerate, Verdict::Refused] {
            let report = SelfTestReport {
                verdict,
                ..SelfTestReport::default()
            };
            let text = serde_json::to_string(&report).unwrap();
            let before: Before = serde_json::from_str(&text).unwrap();
            assert!(before.rows.is_empty());
            let accelerates = match before.verdict {
                WordBefore::AllPass | WordBefore::SomeFail => true,
                WordBefore::Refused => false,
            };
            assert_eq!(accelerates, verdict == Verdict::Accelerate);
        }
    }
}
