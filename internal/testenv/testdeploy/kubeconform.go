// Package testdeploy gets the tools that check what deploy/ holds: charts,
// manifests, alerts, units and packages.
//
// Helm, Kustomize, kubeconform, nfpm and cyclonedx-gomod are built from the
// modules pinned in tools/ (half a minute to two minutes each); promtool and
// systemd-analyze are Debian's (seconds).
package testdeploy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

var (
	// PromtoolTool is the tool of Prometheus that tests rules.
	PromtoolTool = testenv.DebianTool("prometheus", "promtool", "/usr/bin/promtool")
	// SystemdTool is the tool of systemd that checks units.
	SystemdTool = testenv.DebianTool("systemd", "systemd-analyze", "/usr/bin/systemd-analyze")
	// NfpmTool makes packages.
	NfpmTool = testenv.GoTool("nfpm", "nfpm", "github.com/goreleaser/nfpm/v2", "github.com/goreleaser/nfpm/v2/cmd/nfpm")
	// CycloneDXTool writes what a program is made of.
	CycloneDXTool = testenv.GoTool("cyclonedx-gomod", "cyclonedx-gomod", "github.com/CycloneDX/cyclonedx-gomod", "github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod")
	// HelmTool is Helm.
	HelmTool = testenv.GoTool("helm", "helm", "helm.sh/helm/v3", "helm.sh/helm/v3/cmd/helm")
	// KustomizeTool is Kustomize.
	KustomizeTool = testenv.GoTool("kustomize", "kustomize", "sigs.k8s.io/kustomize/kustomize/v5", "sigs.k8s.io/kustomize/kustomize/v5")
	// KubeconformTool checks manifests against the schemas of Kubernetes.
	KubeconformTool = kubeconformTool()
)

// KubernetesVersions are the versions of Kubernetes whose schemas
// [KubeconformTool] has: the oldest that the chart is for, and the newest.
var KubernetesVersions = []string{"1.29.0", "1.37.0"}

// kubeconformTool is kubeconform with the schemas beside it. The binary is a
// script that names them.
func kubeconformTool() testenv.Tool {
	const folder = "kubeconform"
	built := testenv.GoTool(folder, "kubeconform", "github.com/yannh/kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform")
	tool := built
	tool.Version = func(root string) (string, error) {
		version, err := built.Version(root)
		schemas, err2 := testenv.PythonVersion(root, folder, "kubernetes-validate")
		return version + "-" + schemas, errors.Join(err, err2)
	}
	tool.Get = func(ctx context.Context, root, binary string) error {
		tmp, final := filepath.Dir(binary), filepath.Dir(filepath.Dir(binary))
		if err := built.Get(ctx, root, filepath.Join(final, "kubeconform.bin")); err != nil {
			return err
		}
		packages, err := testenv.PythonPackages(ctx, root, folder, tmp)
		if err != nil {
			return err
		}
		for _, version := range KubernetesVersions {
			if err := copySchemas(packages, version, filepath.Join(final, "schemas", "v"+version)); err != nil {
				return err
			}
		}
		const script = `#!/bin/sh
dir=$(cd "$(dirname "$0")" && pwd)
exec "$dir/kubeconform.bin" -strict -schema-location "$dir/schemas/{{.NormalizedKubernetesVersion}}/{{.ResourceKind}}{{.KindSuffix}}.json" "$@"
`
		return os.WriteFile(binary, []byte(script), 0o755) //nolint:gosec // a program
	}
	return tool
}

// copySchemas writes the strict schemas of a version to a folder, with
// references that a file beside them answers.
func copySchemas(packages, version, to string) error {
	files, err := filepath.Glob(filepath.Join(packages, "*", "*", "v"+version+"-local-strict", "*.json"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("%s has no schemas of Kubernetes %s: %w", packages, version, err)
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		var schema map[string]json.RawMessage
		if err := json.Unmarshal(bytes.ReplaceAll(text, []byte(`"/api/_definitions.json`), []byte(`"_definitions.json`)), &schema); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		// By the name that it gives itself the others would be looked for on
		// the network.
		delete(schema, "$id")
		if text, err = json.Marshal(schema); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(to, filepath.Base(file)), text, 0o644); err != nil { //nolint:gosec // public
			return err
		}
	}
	return nil
}
