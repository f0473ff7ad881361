//! What is measured.

use super::{
    objects::TARGET,
    scene::{Scene, Site, WAYS, Way},
};
use crate::bench::{
    figures::{Figures, Grouped, OURS, Outcome, rates},
    processor::busy,
    row::Row,
};
use anyhow::Result;
use sinabro_lab::traffic::{brief::brief_through, echoes::echoes_through, seat::Measured};
use std::{fmt, net::SocketAddr, ops::AddAssign, time::Duration};

/// By the address of the pod itself, on the same node.
const DIRECT: &str = "pod's address";
const CONNECTS: &str = "connections";
const EXCHANGES: &str = "requests";
/// Threads at each end of short connections.
const THREADS: usize = 4;
/// Bytes of a request, and of a response.
const REQUEST: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Connections,
    Echoes,
}

impl Kind {
    fn metric(self) -> &'static str {
        match self {
            Self::Connections => CONNECTS,
            Self::Echoes => EXCHANGES,
        }
    }
}

/// So many Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Number(pub u32);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} Services", self.0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub number: Number,
    pub kind: Kind,
    pub way: Way,
}

impl Case {
    /// Without the number of Services.
    fn name(&self) -> String {
        let kind = match self.kind {
            Kind::Connections => "TCP connect/request/response",
            Kind::Echoes => "UDP request/response",
        };
        let way = match self.way {
            Way::Near | Way::IntoNear => "same node",
            Way::Far | Way::IntoFar => "across nodes",
        };
        match self.way.is_from_outside() {
            false => format!("{kind}, {way}"),
            true => format!("{kind}, node port from outside, {way}"),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.number, self.name())
    }
}

impl Grouped for Case {
    type Group = Number;

    fn group(&self) -> Number {
        self.number
    }

    fn place(&self) -> String {
        self.name()
    }
}

pub fn cases(numbers: &[u32]) -> impl Iterator<Item = Case> {
    let kinds = [Kind::Connections, Kind::Echoes];
    let cases = kinds
        .into_iter()
        .flat_map(|kind| WAYS.map(|way| (kind, way)));
    cases.flat_map(move |(kind, way)| {
        numbers.iter().map(move |number| Case {
            number: Number(*number),
            kind,
            way,
        })
    })
}

/// Who is measured in a case: each site by its Services, and ours by the pod's own address, too, which nobody outside has.
pub fn subjects<'a>(scene: &'a Scene, case: &Case) -> Vec<(&'a str, &'a Site)> {
    let sites = scene.sites(case.number.0);
    let direct = sites.iter().find(|site| site.name() == OURS);
    let direct = direct.filter(|_| !case.way.is_from_outside());
    let direct = direct.map(|site| (DIRECT, *site));
    let sites = sites.iter().map(|site| (site.name(), *site));
    sites.chain(direct).collect()
}

/// What a subject did in one of its turns.
#[derive(Clone, Copy, Default)]
pub struct Done {
    measured: Measured,
    /// CPU time of the whole machine meanwhile.
    machine: Duration,
}

impl AddAssign for Done {
    fn add_assign(&mut self, other: Self) {
        self.measured += other.measured;
        self.machine += other.machine;
    }
}

impl Done {
    pub fn outcome(&self, case: &Case) -> Outcome {
        rates(case.kind.metric(), "1/s", &self.measured, self.machine).into()
    }
}

pub fn measure(
    case: &Case,
    scene: &Scene,
    (name, site): (&str, &Site),
    time: Duration,
) -> Result<Done> {
    let ends = scene.ends(site, case.way);
    let targets = match name {
        DIRECT => vec![SocketAddr::new(ends.address, TARGET)],
        _ => site.targets(case.way),
    };
    let before = busy()?;
    let measured = match case.kind {
        Kind::Connections => {
            let listener = ends.listen(TARGET)?;
            brief_through(ends, &listener, &targets, THREADS, 0, time)
        }
        Kind::Echoes => echoes_through(ends, targets[0], TARGET, REQUEST, 1, time),
    }?;
    let machine = busy()?.saturating_sub(before);
    Ok(Done { measured, machine })
}

/// Ours with most Services beside ours with fewest.
pub fn growth(figures: &Figures<Number>, numbers: &[u32]) -> Vec<Row> {
    let [Some(fewest), Some(most)] = [numbers.iter().min(), numbers.iter().max()] else {
        return Vec::new();
    };
    let last: Vec<Case> = cases(numbers)
        .filter(|case| case.number.0 == *most)
        .collect();
    let row = |case: &Case| {
        let metric = case.kind.metric();
        let first = Case {
            number: Number(*fewest),
            ..*case
        };
        let [many, few] =
            [case, &first].map(|case| figures.values(&case.to_string(), metric, OURS));
        let [many_name, few_name] = [case, &first].map(|case| format!("{OURS}, {}", case.number));
        Row::new(
            &case.name(),
            metric,
            "1/s",
            (&many_name, many?),
            (&few_name, few?),
        )
    };
    last.iter().filter_map(row).collect()
}
