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
- {name: web, instances: [{id: web-1, address: 10.0.0.1, port: 80}, {id: web-2, address: 169.254.169.254, port: 80}]}
- {name: kubernetes, instances: [{id: k-1, address: 10.0.0.2, port: 443}]}
- {name: admin, instances: [{id: a-1, address: 127.0.0.1, port: 15000}]}
`)
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	text := func(listen, owns string) string {
		return "listen: {xds: " + listen + ", admin: 127.0.0.1:0}\n" +
			"registries: [{name: files, type: file, config: {path: " + dir + "}, protect: {min_share: 0}, owns: {" + owns + "}}]\n"
	}
	replaceFile(t, file, text("127.0.0.1:0", ""))
	r := &reloaded{process: start(t, "serve", "--config", file), file: file}
	at := r.find(r.stderr, `msg=serving xds=(\S+) admin=(\S+)`)
	r.xds, r.admin = []string{at[1]}, "http://"+at[2]
	await(t, r.admin+"/readyz", `^ready`)
	services := func(want string) {
		t.Helper()
		await(t, r.admin+"/api/v1/services?registry=files", want)
	}
	// Of each service its ServiceEntry and its endpoints.
	services(`"total": 3,?\n`)
	await(t, r.admin+"/api/v1/resources?q=web", `"total": 2,?\n`)
	await(t, r.admin+"/api/v1/registries",
		`address 169\.254\.169\.254 is not the registry's: it is link-local, with the metadata service of most clouds; name it in owns\.addresses if it is; refused"`,
		`"field": "owns.addresses"`)
	await(t, r.admin+"/metrics", `isthmus_registry_problem_reasons\{reason="refused",registry="files"\} 1`)

	if a := r.reload(text("127.0.0.1:0", `hosts: ["web.*", "admin.*"], addresses: [10.0.0.0/8, 169.254.169.254]`)); a.Result != "success" {
		t.Fatalf("reload = %+v", a)
	}
	services(`"total": 2,?\n`) // kubernetes is gone, admin has no endpoint
	await(t, r.admin+"/api/v1/resources?q=web", `"total": 3,?\n`)
	await(t, r.admin+"/api/v1/registries", `host kubernetes\.files is not the registry's: owns\.hosts has web\.\*, admin\.\*; name it in owns\.hosts`, `address 127\.0\.0\.1 is not the registry's: owns.addresses has 10\.0\.0\.0/8`)

	// Other machines: loopback is nobody's.
	if a := r.reload(text(`{address: "0.0.0.0:0", insecure: true}`, "")); a.Result != "success" {
		t.Fatalf("reload = %+v", a)
	}
	await(t, r.admin+"/api/v1/registries", `address 127\.0\.0\.1 is not the registry's: it is loopback, which is another machine for each proxy`)
	r.end()
}
