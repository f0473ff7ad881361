//! `cargo xtask chart`: whether the Helm chart says what deploy/sinabro.yaml says.
//!
//! Both are written by hand, because both are read by people. So Helm itself renders the chart,
//! with its default values, and every object must be equal; and then with every value set, where
//! each must be found where it belongs. Helm is the one that is installed, else one that Go
//! builds beside the programs of clusters.

use crate::{
    cluster::components,
    manifest::{self, Objects},
    ui,
    workspace::{output, which},
};
use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

/// Every value, other than by default.
const OTHER_VALUES: &str = "\
image: {repository: registry.example/net/sinabro, tag: '2', pullPolicy: Always}
imagePullSecrets: [registry]
settings:
  vxlanVni: 16777215
  masquerade: false
  nonMasqueradeCIDRs: [10.0.0.0/8, 'fd00::/8']
  stateDir: /var/lib/s
  cniBinDir: /usr/libexec/cni
  cniConfDir: /etc/kubernetes/cni
  programsDir: /var/lib/p
  metricsAddress: '[::]:9999'
ipMasqAgent: {nonMasqueradeCIDRs: [10.0.0.0/8], masqLinkLocal: false}
apiServer: {host: api.example, port: 8443}
extraEnv: [{name: SINABRO_LOG_LEVEL, value: debug}]
resources: {requests: null, limits: {memory: 1Gi}}
nodeSelector: {kubernetes.io/os: null, pool: a}
tolerations: [{key: t, operator: Exists}]
maxUnavailable: 2
admissionPolicy: false
";

pub fn run() -> Result<ExitCode> {
    let helm = helm()?;
    let chart = manifest::deploy().join("chart");
    let lint = output(Command::new(&helm).arg("lint").arg("--strict").arg(&chart));
    lint.context("the chart is not valid")?;

    let mut problems = compare(
        &template(&helm, &chart, "")?,
        &manifest::read("sinabro.yaml")?,
    );
    problems.extend(misplaced(&template(&helm, &chart, OTHER_VALUES)?)?);
    for problem in &problems {
        ui::error(problem);
    }
    if !problems.is_empty() {
        return Ok(ExitCode::FAILURE);
    }
    println!("  the chart renders to the objects of deploy/sinabro.yaml, and every value counts");
    Ok(ExitCode::SUCCESS)
}

fn template(helm: &Path, chart: &Path, values: &str) -> Result<Objects> {
    let mut file = tempfile::NamedTempFile::new()?;
    std::io::Write::write_all(&mut file, values.as_bytes())?;
    let mut command = Command::new(helm);
    command
        .args(["template", "sinabro"])
        .arg(chart)
        .args(["--namespace", "kube-system", "--values"])
        .arg(file.path())
        // Which one Helm takes by itself depends on how it was built.
        .args(["--kube-version", components::KUBERNETES]);
    let rendered = output(&mut command).context("cannot render the chart")?;
    manifest::parse(&rendered).context("the chart renders to something that is not valid")
}

fn compare(chart: &Objects, manifest: &Objects) -> Vec<String> {
    let mut problems = Vec::new();
    for (key, object) in manifest {
        match chart.get(key) {
            None => problems.push(format!("the chart has no {key}")),
            Some(rendered) => problems.extend(
                manifest::differences(rendered, object)
                    .into_iter()
                    .map(|what| format!("chart and manifest differ, {key} {what}")),
            ),
        }
    }
    let more = chart.keys().filter(|key| !manifest.contains_key(*key));
    problems.extend(more.map(|key| format!("only the chart has {key}")));
    problems
}

/// What [`OTHER_VALUES`] should have changed and have not.
fn misplaced(objects: &Objects) -> Result<Vec<String>> {
    let get = |key: &str| {
        objects
            .get(key)
            .with_context(|| format!("there is no {key}"))
    };
    let daemon_set = get("DaemonSet kube-system/sinabro")?;
    let pod = &daemon_set["spec"]["template"]["spec"];
    let (prepare, agent) = (&pod["initContainers"][0], &pod["containers"][0]);
    let named = |list: &Value, name: &str| {
        let items = list.as_array().into_iter().flatten();
        let mut found = items.filter(|item| item["name"] == name).cloned();
        found.next().unwrap_or(Value::Null)
    };
    let probe = json!({"host": "::1", "port": 9999, "path": "/healthz"});
    let mut expected = vec![
        (
            "image",
            &prepare["image"],
            json!("registry.example/net/sinabro:2"),
        ),
        (
            "image",
            &agent["image"],
            json!("registry.example/net/sinabro:2"),
        ),
        (
            "image.pullPolicy",
            &agent["imagePullPolicy"],
            json!("Always"),
        ),
        (
            "resources",
            &agent["resources"],
            json!({"limits": {"memory": "1Gi"}}),
        ),
        ("nodeSelector", &pod["nodeSelector"], json!({"pool": "a"})),
        ("tolerations", &pod["tolerations"][0]["key"], json!("t")),
        (
            "maxUnavailable",
            &daemon_set["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"],
            json!(2),
        ),
        (
            "settings.metricsAddress",
            &agent["livenessProbe"]["httpGet"],
            probe,
        ),
        (
            "imagePullSecrets",
            &get("ServiceAccount kube-system/sinabro")?["imagePullSecrets"],
            json!([{"name": "registry"}]),
        ),
    ];
    let env = |name| named(&agent["env"], name)["value"].clone();
    let (host, port) = (
        env("KUBERNETES_SERVICE_HOST"),
        env("KUBERNETES_SERVICE_PORT"),
    );
    let level = env("SINABRO_LOG_LEVEL");
    expected.extend([
        ("apiServer.host", &host, json!("api.example")),
        ("apiServer.port", &port, json!("8443")),
        ("extraEnv", &level, json!("debug")),
    ]);
    let directory = |name| {
        let inside = named(&agent["volumeMounts"], name)["mountPath"].clone();
        let outside = named(&pod["volumes"], name)["hostPath"]["path"].clone();
        json!([inside, outside])
    };
    let prepared = named(&prepare["volumeMounts"], "state")["mountPath"].clone();
    let directories = [
        directory("state"),
        directory("cni-bin"),
        directory("cni-conf"),
        directory("programs"),
    ];
    expected.extend([
        (
            "settings.stateDir",
            &directories[0],
            json!(["/var/lib/s", "/var/lib/s"]),
        ),
        ("settings.stateDir", &prepared, json!("/var/lib/s")),
        (
            "settings.cniBinDir",
            &directories[1],
            json!(["/usr/libexec/cni", "/usr/libexec/cni"]),
        ),
        (
            "settings.cniConfDir",
            &directories[2],
            json!(["/etc/kubernetes/cni", "/etc/kubernetes/cni"]),
        ),
        (
            "settings.programsDir",
            &directories[3],
            json!(["/var/lib/p", "/var/lib/p"]),
        ),
    ]);
    let mut problems: Vec<String> = expected
        .iter()
        .filter(|(_, found, wanted)| *found != wanted)
        .map(|(value, found, wanted)| format!("value {value} makes {found}, not {wanted}"))
        .collect();

    let mut values: Value = serde_saphyr::from_str(OTHER_VALUES)?;
    for (value, map, key) in [
        ("settings", "ConfigMap kube-system/sinabro", "config.yaml"),
        (
            "ipMasqAgent",
            "ConfigMap kube-system/ip-masq-agent",
            "config",
        ),
    ] {
        let file = &get(map)?["data"][key];
        let file: Value = serde_saphyr::from_str(file.as_str().unwrap_or_default())
            .with_context(|| format!("{key} of the {map} that the chart makes is not valid"))?;
        problems.extend(manifest::differences(&file, &values[value].take()));
    }
    if daemon_set["spec"]["template"]["metadata"]["annotations"].is_null() {
        problems.push("other settings do not restart the agents".into());
    }
    if objects
        .keys()
        .any(|key| key.contains("ValidatingAdmissionPolicy"))
    {
        problems.push("value admissionPolicy leaves the policy in place".into());
    }
    Ok(problems)
}

/// Helm's path; builds it if it is not installed.
fn helm() -> Result<PathBuf> {
    if let Some(helm) = which("helm") {
        return Ok(helm);
    }
    components::ensure_helm()
        .context("helm is missing: install it (https://helm.sh), or Go, which then builds it")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn an_object_that_only_one_has_or_that_differs_is_a_problem() {
        let objects = |yaml| manifest::parse(yaml).unwrap();
        let one = objects("kind: A\nmetadata: {name: x}\n");
        let two = objects("kind: A\nmetadata: {name: x}\n---\nkind: B\nmetadata: {name: x}\n");
        let other = objects("kind: A\nmetadata: {name: x}\nspec: 1\n");
        assert!(compare(&two, &two).is_empty());
        assert_eq!(compare(&one, &two), ["the chart has no B x"]);
        assert_eq!(compare(&two, &one), ["only the chart has B x"]);
        assert_eq!(compare(&other, &one).len(), 1);
    }

    #[test]
    fn chart_and_manifest_are_of_this_version() {
        let version = env!("CARGO_PKG_VERSION");
        let chart = fs::read_to_string(manifest::deploy().join("chart/Chart.yaml")).unwrap();
        let chart: Value = serde_saphyr::from_str(&chart).unwrap();
        assert_eq!(chart["version"], version);
        assert_eq!(chart["appVersion"], version);
        for (file, name) in [
            ("sinabro.yaml", "sinabro"),
            ("uninstall.yaml", "sinabro-uninstall"),
        ] {
            let objects = manifest::read(file).unwrap();
            let pod =
                &objects[&format!("DaemonSet kube-system/{name}")]["spec"]["template"]["spec"];
            for list in ["initContainers", "containers"] {
                for container in pod[list].as_array().unwrap() {
                    assert_eq!(
                        container["image"],
                        crate::image::NAME,
                        "{file} {}",
                        container["name"]
                    );
                }
            }
        }
    }
}
