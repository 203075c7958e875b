package main

import (
	"path/filepath"
	"testing"
)

// What is not the registry's is refused and listed with the field that would
// permit it, and nothing else suffers. Changed rules hold at once, for what was
// served before too.
func TestOwns(t *testing.T) {
	dir := t.TempDir()
	replaceFile(t, filepath.Join(dir, "services.yaml"), `services:
- {name: web, instances: [{id: web-1, address: 10.0.0.1, port: 80, meta: {security.istio.io/tlsMode: disabled}}, {id: web-2, address: 169.254.169.254, port: 80}]}
- {name: kubernetes, instances: [{id: k-1, address: 10.0.0.2, port: 443}]}
- {name: admin, instances: [{id: a-1, address: 127.0.0.1, port: 15000}]}
`)
	replaceFile(t, filepath.Join(dir, "istio.yaml"), `apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: payments, namespace: files}
spec: {hosts: [payments.prod.svc.cluster.local], ports: [{number: 80, name: http, protocol: HTTP}], resolution: STATIC}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: labelled, namespace: files}
spec: {hosts: [labelled.example.org], ports: [{number: 80, name: http, protocol: HTTP}], resolution: STATIC, endpoints: [{address: 10.0.0.3, labels: {istio-locality: us.us-1}}]}
---
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: all, namespace: istio-system}
spec: {}
`)
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	text := func(owns string) string {
		return "listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\n" +
			"registries: [{name: files, type: file, config: {path: " + dir + "}, protect: {min_share: 0}, owns: {" + owns + "}}]\n"
	}
	replaceFile(t, file, text(""))
	r := &reloaded{process: start(t, "serve", "--config", file), file: file}
	at := r.find(r.stderr, `msg=serving xds=(\S+) admin=(\S+)`)
	r.xds, r.admin = []string{at[1]}, "http://"+at[2]
	await(t, r.admin+"/readyz", `^ready`)
	services := func(want string) {
		t.Helper()
		await(t, r.admin+"/api/v1/services?registry=files", want)
	}
	problem := func(texts ...string) {
		t.Helper()
		await(t, r.admin+"/api/v1/registries", texts...)
	}
	// Of each service its ServiceEntry and its endpoints.
	services(`"total": 3,?\n`)
	await(t, r.admin+"/api/v1/resources?q=web", `"total": 2,?\n`)
	await(t, r.admin+"/api/v1/resources?q=admin", `"total": 1,?\n`)
	problem(
		`address 169\.254\.169\.254 is not the registry's: it is link-local, with the metadata service of most clouds; name it in owns\.addresses if it is; rejected"`,
		`address 127\.0\.0\.1 is not the registry's: it is loopback, where each proxy has its own administration port; name it in owns\.addresses`,
		`host payments\.prod\.svc\.cluster\.local is not the registry's: hosts of cluster\.local are the cluster's own; name it in owns\.hosts`,
		`kind networking\.istio\.io/EnvoyFilter is not the registry's: owns\.collections has networking\.istio\.io/ServiceEntry, networking\.istio\.io/WorkloadEntry; name it in owns\.collections`,
		`label or annotation istio-locality is not the registry's: Istio gives it a meaning; name it in owns\.labels`,
		// The instance is served without what its metadata may not say.
		`the label security\.istio\.io/tlsMode|label \\"security\.istio\.io/tlsMode\\"`,
		`"field": "owns.addresses"`, `"field": "owns.collections"`, `"field": "owns.hosts"`, `"field": "owns.labels"`)
	await(t, r.admin+"/metrics", `isthmus_registry_problem_reasons\{reason="refused",registry="files"\} 5`)

	if a := r.reload(text(`hosts: ["web.*", "admin.*", "*.prod.svc.cluster.local", "*.example.org"], addresses: [10.0.0.0/8, 169.254.169.254], labels: ["*"], collections: ["*"]`)); a.Result != "success" {
		t.Fatalf("reload = %+v", a)
	}
	services(`"total": 2,?\n`) // kubernetes is gone, admin has no endpoint
	await(t, r.admin+"/api/v1/resources?q=web", `"total": 3,?\n`)
	await(t, r.admin+"/api/v1/resources?q=labelled", `"total": 1,?\n`)
	await(t, r.admin+"/api/v1/resources?q=payments", `"total": 1,?\n`)
	problem(`host kubernetes\.files is not the registry's: owns\.hosts has web\.\*, admin\.\*, \*\.prod\.svc\.cluster\.local, \*\.example\.org; name it in owns\.hosts`,
		`address 127\.0\.0\.1 is not the registry's: owns.addresses has 10\.0\.0\.0/8`,
		`namespace istio-system is not the registry's: what is about workloads, as this EnvoyFilter is, reaches those of others there; name it in owns\.namespaces`)
	r.end()
}
