package testenv

import (
	"context"
	"encoding/xml"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
)

// MavenTool is a tool pinned in tools/FOLDER/pom.xml, with the launcher in
// tools/LAUNCHER, which versions may share. The cache holds a script that runs
// java with its arguments, and the jars. The jar named first, "" for none, is
// first on the class path. The first server that is ready has its classes kept
// beside them, for faster starts; see keepClasses.
func MavenTool(name, folder, launcher, first string) Tool {
	return Tool{
		Name: name, Program: name,
		Version: func(root string) (string, error) {
			b, err := os.ReadFile(filepath.Join(root, "tools", folder, "pom.xml"))
			if err != nil {
				return "", err
			}
			var pom struct {
				Version string `xml:"version"`
			}
			if err := xml.Unmarshal(b, &pom); err != nil || pom.Version == "" {
				return "", fmt.Errorf("tools/%s/pom.xml has no version: %w", folder, err)
			}
			jars, err := Digest(filepath.Join(root, "tools", folder))
			if err != nil {
				return "", err
			}
			classes, err := Digest(filepath.Join(root, "tools", launcher))
			return pom.Version + "-" + jars[:4] + classes[:4] + mavenLayout, err
		},
		Get: func(ctx context.Context, root, path string) error {
			source := filepath.Join(root, "tools", folder)
			tmp, final := filepath.Dir(path), filepath.Dir(filepath.Dir(path))
			if err := os.RemoveAll(filepath.Join(final, "lib")); err != nil {
				return err
			}
			mvn := exec.CommandContext(ctx, "mvn", "-B", "-q", "-f", filepath.Join(source, "pom.xml"), "dependency:copy-dependencies",
				"-DoutputDirectory="+filepath.Join(final, "lib"))
			if err := RunQuiet(mvn); err != nil {
				return fmt.Errorf("get what tools/%s/pom.xml names (it needs mvn, java 17 and Maven Central the first time): %w", folder, err)
			}
			sources, err := filepath.Glob(filepath.Join(root, "tools", launcher, "*.java"))
			if err != nil {
				return err
			}
			javac := exec.CommandContext(ctx, "javac", append([]string{
				"-nowarn", "-cp", filepath.Join(final, "lib", "*"), "-d", filepath.Join(tmp, "classes"),
			}, sources...)...)
			if err := RunQuiet(javac); err != nil {
				return fmt.Errorf("compile tools/%s/*.java: %w", launcher, err)
			}
			// An archive of classes is of jars alone.
			if err := RunQuiet(exec.CommandContext(ctx, "jar", "--create", "--file", filepath.Join(final, "launcher.jar"), "-C", filepath.Join(tmp, "classes"), ".")); err != nil {
				return fmt.Errorf("pack tools/%s: %w", launcher, err)
			}
			classPath := `$dir/launcher.jar:$dir/lib/*`
			if first != "" {
				classPath = `$dir/launcher.jar:$dir/lib/` + first + `:$dir/lib/*`
			}
			script := `#!/bin/sh
dir=$(cd "$(dirname "$0")" && pwd)
kept=-XX:+RecordDynamicDumpInfo
[ -f "$dir/` + classArchive + `" ] && kept="-XX:SharedArchiveFile=$dir/` + classArchive + `"
exec java "$kept" -cp "` + classPath + `" "$@" io.isthmus.tools.Launcher
`
			return os.WriteFile(path, []byte(script), 0o755)
		},
	}
}

// mavenLayout is a part of each version: another one has all tools made again.
const mavenLayout = "a"

// classArchive is the file of a Maven tool's kept classes.
const classArchive = "classes.jsa"

// keepClasses has a Java server that is ready write the classes that it has
// loaded to a file, as others of the tool read them there in half the time. It
// does nothing for other programs, and if that is done, or being done. Without
// it a start takes longer, so that an error is only logged.
func (p *Process) keepClasses(t testing.TB) {
	r := p.run.Load()
	dir := filepath.Dir(r.cmd.Path)
	archive := filepath.Join(dir, classArchive)
	if _, err := os.Stat(filepath.Join(dir, "launcher.jar")); err != nil {
		return
	}
	if _, err := os.Stat(archive); err == nil {
		return
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	unlock, err := LockFile(ctx, archive+".lock", cancel)
	if err != nil {
		return // another process does it
	}
	defer unlock()
	if _, err := os.Stat(archive); err == nil {
		return
	}
	tmp := archive + ".tmp"
	err = RunQuiet(exec.CommandContext(ctx, "jcmd", strconv.Itoa(r.cmd.Process.Pid), "VM.cds", "dynamic_dump", tmp))
	if err == nil {
		err = os.Rename(tmp, archive)
	}
	if err != nil {
		t.Logf("%s: keep its classes: %v", p.name, err)
	}
}

// JavaArgs returns the arguments of a Java program that is to start fast, with
// a heap of so many MiB.
func JavaArgs(dir string, heapMB int, properties map[string]string) []string {
	args := []string{fmt.Sprintf("-Xmx%dm", heapMB), "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote", "-Djava.io.tmpdir=" + dir}
	for _, k := range slices.Sorted(maps.Keys(properties)) {
		args = append(args, "-D"+k+"="+properties[k])
	}
	return args
}
