//! Where the time goes: seconds of each step on each machine.

use super::outcome::Outcome;
use crate::ui;
use serde::Serialize;
use std::time::Instant;

/// What a step took on a machine, in all its boots.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Took {
    pub name: String,
    pub seconds: f64,
}

/// What a machine is doing, and since when.
#[derive(Debug, Default)]
pub struct Clock(Option<(String, Instant)>);

impl Clock {
    /// Another step begins.
    pub fn next(&mut self, steps: &mut Vec<Took>, name: &str) {
        self.stop(steps);
        self.0 = Some((name.to_owned(), Instant::now()));
    }

    pub fn stop(&mut self, steps: &mut Vec<Took>) {
        let Some((name, since)) = self.0.take() else {
            return;
        };
        let seconds = since.elapsed().as_secs_f64();
        match steps.iter_mut().find(|took| took.name == name) {
            Some(took) => took.seconds += seconds,
            None => steps.push(Took { name, seconds }),
        }
    }
}

pub fn print(outcomes: &[Outcome]) {
    println!(
        "\n{}",
        ui::bold("Seconds, and what they had of a processor")
    );
    ui::table(&rows(outcomes));
}

fn rows(outcomes: &[Outcome]) -> Vec<Vec<String>> {
    let mut names: Vec<&str> = Vec::new();
    for took in outcomes.iter().flat_map(|outcome| &outcome.steps) {
        if !names.contains(&took.name.as_str()) {
            names.push(&took.name);
        }
    }
    let heading = |name: &&str| (*name).to_owned();
    let mut rows = vec![
        ["machine"]
            .iter()
            .chain(&names)
            .chain(&["all", "processor"])
            .map(heading)
            .collect(),
    ];
    let cell = |seconds: f64| match seconds {
        0.0 => String::new(),
        seconds => format!("{seconds:.0}"),
    };
    let mut add = |title: String, of: &[&Outcome]| {
        let sum = |each: &dyn Fn(&Outcome) -> f64| of.iter().map(|outcome| each(outcome)).sum();
        let mut row = vec![title];
        for name in &names {
            let each = |outcome: &Outcome| -> f64 {
                let took = outcome.steps.iter().filter(|took| took.name == **name);
                took.map(|took| took.seconds).sum()
            };
            row.push(cell(sum(&each)));
        }
        row.push(cell(sum(&|outcome| outcome.seconds)));
        row.push(cell(sum(&|outcome| outcome.processor_seconds)));
        rows.push(row);
    };
    for outcome in outcomes {
        add(outcome.title(), &[outcome]);
    }
    add("all machines".into(), &outcomes.iter().collect::<Vec<_>>());
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_was_not_taken_has_no_time_and_all_are_added_up() {
        let of = |name: &str, steps: &[(&str, f64)]| Outcome {
            steps: steps
                .iter()
                .map(|&(name, seconds)| Took {
                    name: name.into(),
                    seconds,
                })
                .collect(),
            seconds: steps.iter().map(|step| step.1).sum(),
            processor_seconds: 4.0,
            ..Outcome::new(name, "", "")
        };
        let both = [
            of("a", &[("boot", 2.0), ("verify", 8.0)]),
            of("b", &[("boot", 3.0), ("node", 20.0)]),
        ];
        let expected = [
            ["machine", "boot", "verify", "node", "all", "processor"],
            ["a", "2", "8", "", "10", "4"],
            ["b", "3", "", "20", "23", "4"],
            ["all machines", "5", "8", "20", "33", "8"],
        ];
        assert_eq!(rows(&both), expected.map(|row| row.map(String::from)));
    }

    #[test]
    fn a_step_of_two_boots_is_one() {
        let (mut clock, mut steps) = (Clock::default(), Vec::new());
        for name in ["boot", "node", "boot"] {
            clock.next(&mut steps, name);
        }
        clock.stop(&mut steps);
        clock.stop(&mut steps);
        let names: Vec<_> = steps.iter().map(|took| took.name.as_str()).collect();
        assert_eq!(names, ["boot", "node"]);
    }
}
