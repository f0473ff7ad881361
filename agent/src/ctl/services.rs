//! `sinabroctl services`.

use crate::ctl::{
    Common, Exit, client, print,
    table::{Table, join},
};
use sinabro_common::api::{
    Request, Response, ServiceBalancing, ServiceClients, ServiceOutcome, ServicePortReport,
    ServiceReport, ServiceSetReport, ServicesPage,
};

/// Endpoints that are named in a row, unless one Service alone is asked for.
const FEW: usize = 4;

pub fn show(common: &Common, only: Option<&str>) -> Result<Exit, client::Error> {
    let report = all(common, only)?;
    print(common, &report, |report| table(report, only.is_some()))?;
    Ok(Exit::Well)
}

/// All of them, asked for page by page, or one.
pub fn all(common: &Common, only: Option<&str>) -> Result<Vec<ServiceReport>, client::Error> {
    let mut services: Vec<ServiceReport> = Vec::new();
    loop {
        let last = services.last();
        let request = Request::Services {
            after: last.map(|last| format!("{}/{}", last.namespace, last.name)),
            only: only.map(str::to_owned),
        };
        let ServicesPage {
            services: page,
            more,
        } = client::ask(common, request, |response| match response {
            Response::Services(page) => Some(page),
            _ => None,
        })?;
        let is_done = !more || page.is_empty();
        services.extend(page);
        if is_done {
            return Ok(services);
        }
    }
}

fn table(services: &[ServiceReport], is_one: bool) -> String {
    let mut table = Table::new([
        "SERVICE",
        "PORT",
        "FRONTENDS",
        "CLIENTS",
        "ENDPOINTS",
        "DRAINING",
        "PROBLEM",
    ]);
    let many = if is_one { usize::MAX } else { FEW };
    for service in services {
        let mut name = format!("{}/{}", service.namespace, service.name);
        let mut problem = service.problem.clone().unwrap_or_default();
        for port in &service.ports {
            let mut draining = join(&port.draining);
            for set in &port.sets {
                table.row([
                    std::mem::take(&mut name),
                    words(port),
                    join(&set.frontends),
                    clients(set),
                    endpoints(set, many),
                    std::mem::take(&mut draining),
                    std::mem::take(&mut problem),
                ]);
            }
        }
        // None of its ports is published.
        if !name.is_empty() {
            let none = String::new;
            table.row([name, none(), none(), none(), none(), none(), problem]);
        }
    }
    let mut text = table.render();
    let mut table = Table::new(["PORT", "ADDRESS", "NOT USED BECAUSE"]);
    let unused = services.iter().flat_map(|service| &service.unused);
    for unused in unused.clone() {
        let endpoint = unused.endpoint.to_string();
        table.row([unused.port.clone(), endpoint, unused.why.clone()]);
    }
    if unused.count() > 0 {
        text.push('\n');
        text.push_str(&table.render());
    }
    text
}

/// `http/tcp affinity 10800s`.
fn words(port: &ServicePortReport) -> String {
    let mut text = match port.name.is_empty() {
        true => port.protocol.clone(),
        false => format!("{}/{}", port.name, port.protocol),
    };
    if port.affinity_seconds > 0 {
        text.push_str(&format!(" affinity {}s", port.affinity_seconds));
    }
    text
}

/// `outside, of 10.0.0.0/8 (balancing: maglev)`.
fn clients(set: &ServiceSetReport) -> String {
    let clients = match set.clients {
        ServiceClients::All => "all",
        ServiceClients::Inside => "inside",
        ServiceClients::Outside => "outside",
    };
    let mut text = match set.source_ranges[..] {
        [] => clients.to_string(),
        _ => format!("{clients}, of {}", join(&set.source_ranges)),
    };
    match set.balancing {
        None => {}
        Some(ServiceBalancing::Maglev) => text.push_str(" (balancing: maglev)"),
    }
    text
}

fn endpoints(set: &ServiceSetReport, many: usize) -> String {
    match set.outcome {
        ServiceOutcome::Refuse => "none, refused".into(),
        ServiceOutcome::Drop => "none here, dropped".into(),
        ServiceOutcome::Balance => {
            let named = &set.endpoints[..set.endpoints.len().min(many)];
            match (set.count as usize).saturating_sub(named.len()) {
                0 => join(named),
                others => format!("{} and {others} more", join(named)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinabro_common::api::UnusedEndpoint;

    #[test]
    fn a_row_for_each_set_and_a_service_without_any() {
        let at = |host: u8| ([10, 244, 0, host], 8080).into();
        let set = |clients, outcome, hosts: std::ops::Range<u8>| ServiceSetReport {
            frontends: vec![([10, 96, 0, 1], 80).into()],
            clients,
            outcome,
            balancing: match clients {
                ServiceClients::Outside => Some(ServiceBalancing::Maglev),
                _ => None,
            },
            count: hosts.len() as u32,
            endpoints: hosts.map(at).collect(),
            source_ranges: match clients {
                ServiceClients::Outside => vec!["192.0.2.0/24".parse().unwrap()],
                _ => Vec::new(),
            },
        };
        let web = ServiceReport {
            namespace: "default".into(),
            name: "web".into(),
            addresses: vec![[10, 96, 0, 1].into()],
            ports: vec![ServicePortReport {
                name: "http".into(),
                protocol: "tcp".into(),
                affinity_seconds: 30,
                sets: vec![
                    set(ServiceClients::Inside, ServiceOutcome::Balance, 1..7),
                    set(ServiceClients::Outside, ServiceOutcome::Drop, 0..0),
                ],
                draining: vec![at(9)],
            }],
            unused: vec![UnusedEndpoint {
                port: "http".into(),
                endpoint: at(8),
                why: "it is not ready".into(),
            }],
            problem: None,
        };
        let full = ServiceReport {
            namespace: "default".into(),
            name: "full".into(),
            problem: Some("no room".into()),
            ..ServiceReport::default()
        };
        let text = table(&[web, full], false);
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| {
                line.split("  ")
                    .map(str::trim)
                    .filter(|cell| !cell.is_empty())
                    .collect()
            })
            .collect();
        let few = "10.244.0.1:8080, 10.244.0.2:8080, 10.244.0.3:8080, 10.244.0.4:8080 and 2 more";
        assert_eq!(
            lines[1],
            [
                "default/web",
                "http/tcp affinity 30s",
                "10.96.0.1:80",
                "inside",
                few,
                "10.244.0.9:8080",
                "-"
            ]
        );
        assert_eq!(
            lines[2][3..],
            [
                "outside, of 192.0.2.0/24 (balancing: maglev)",
                "none here, dropped",
                "-",
                "-"
            ]
        );
        assert_eq!(
            lines[3],
            ["default/full", "-", "-", "-", "-", "-", "no room"]
        );
        assert_eq!(lines[6], ["http", "10.244.0.8:8080", "it is not ready"]);
    }
}
