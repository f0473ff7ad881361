//! The cluster's certificates and kubeconfigs, made once and kept with the cluster's state.

use super::layout::{self, Families};
use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

/// Organization of the cluster's administrators.
const ADMINS: &str = "system:masters";

/// Makes whatever is not there yet, for the control plane and these nodes.
pub fn ensure(nodes: &[String], families: Families) -> Result<()> {
    let dir = layout::pki()?;
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let ca = authority(&dir)?;
    let api = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
        "localhost",
        "127.0.0.1",
    ];
    let mut names: Vec<String> = api.map(str::to_owned).to_vec();
    names.push(families.api_service().to_string());
    names.extend(families.control().iter().map(ToString::to_string));
    certificate(&dir, &ca, "apiserver", "kube-apiserver", "", &names)?;
    certificate(
        &dir,
        &ca,
        "kubelet-client",
        "kube-apiserver-kubelet-client",
        ADMINS,
        &[],
    )?;
    certificate(&dir, &ca, "front-proxy", "front-proxy-client", "", &[])?;
    for (file, user, group) in [
        ("admin", "admin", ADMINS),
        ("controllers", "system:kube-controller-manager", ""),
        ("scheduler", "system:kube-scheduler", ""),
        ("proxy", "system:kube-proxy", ""),
    ] {
        certificate(&dir, &ca, file, user, group, &[])?;
        kubeconfig(&dir, file, families)?;
    }
    for node in nodes {
        let number =
            layout::node_number(node).with_context(|| format!("{node} is no node's name"))?;
        let addresses = families.node(number);
        let mut names = vec![node.clone()];
        names.extend(addresses.iter().map(ToString::to_string));
        certificate(
            &dir,
            &ca,
            node,
            &format!("system:node:{node}"),
            "system:nodes",
            &names,
        )?;
        kubeconfig(&dir, node, families)?;
    }
    let accounts = dir.join("service-accounts.key");
    if !accounts.is_file() {
        let key = KeyPair::generate()?;
        fs::write(dir.join("service-accounts.pub"), key.public_key_pem())?;
        secret(&accounts, &key.serialize_pem())?;
    }
    Ok(())
}

fn authority(dir: &Path) -> Result<CertifiedIssuer<'static, KeyPair>> {
    let mut params = params("sinabro-cluster", "", &[])?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![
        KeyUsagePurpose::KeyCertSign,
        KeyUsagePurpose::CrlSign,
        KeyUsagePurpose::DigitalSignature,
    ];
    let (certificate, key) = (dir.join("ca.crt"), dir.join("ca.key"));
    let known = certificate.is_file() && key.is_file();
    let pair = match known {
        true => KeyPair::from_pem(&fs::read_to_string(&key)?).context("ca.key is no key")?,
        false => KeyPair::generate()?,
    };
    // The issuer follows from name and key: one made again signs what the first one would.
    let ca = CertifiedIssuer::self_signed(params, pair)?;
    if !known {
        secret(&key, &ca.key().serialize_pem())?;
        fs::write(&certificate, ca.pem())?;
    }
    Ok(ca)
}

fn params(user: &str, group: &str, names: &[String]) -> Result<CertificateParams> {
    let mut params = CertificateParams::new(names.to_vec())?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, user);
    if !group.is_empty() {
        params
            .distinguished_name
            .push(DnType::OrganizationName, group);
    }
    Ok(params)
}

fn certificate(
    dir: &Path,
    ca: &CertifiedIssuer<'static, KeyPair>,
    file: &str,
    user: &str,
    group: &str,
    names: &[String],
) -> Result<()> {
    let path = dir.join(format!("{file}.crt"));
    if path.is_file() {
        return Ok(());
    }
    let mut params = params(user, group, names)?;
    params.key_usages = vec![
        KeyUsagePurpose::DigitalSignature,
        KeyUsagePurpose::KeyEncipherment,
    ];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, ca)?;
    secret(&dir.join(format!("{file}.key")), &key.serialize_pem())?;
    fs::write(&path, certificate.pem()).with_context(|| format!("cannot write {}", path.display()))
}

fn secret(path: &Path, pem: &str) -> Result<()> {
    fs::write(path, pem).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(fs::set_permissions(
        path,
        fs::Permissions::from_mode(0o600),
    )?)
}

fn kubeconfig(dir: &Path, name: &str, families: Families) -> Result<()> {
    let (dir_text, api) = (dir.display(), format!("https://{}", families.api()));
    let text = format!(
        "apiVersion: v1\n\
         kind: Config\n\
         clusters: [{{name: sinabro, cluster: {{server: \"{api}\", certificate-authority: \"{dir_text}/ca.crt\"}}}}]\n\
         users: [{{name: {name}, user: {{client-certificate: \"{dir_text}/{name}.crt\", client-key: \"{dir_text}/{name}.key\"}}}}]\n\
         contexts: [{{name: sinabro, context: {{cluster: sinabro, user: {name}}}}}]\n\
         current-context: sinabro\n"
    );
    let path = dir.join(format!("{name}.kubeconfig"));
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}
