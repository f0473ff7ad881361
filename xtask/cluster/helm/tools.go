//go:build tools

// Package helm holds the module from which Helm is built, to render the chart.
package helm

import _ "helm.sh/helm/v4/cmd/helm"
