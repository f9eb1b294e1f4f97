package penstock.spark;

import java.io.IOException;
import java.net.URI;
import java.net.URISyntaxException;
import java.nio.file.FileSystemException;
import java.nio.file.Files;
import java.nio.file.StandardCopyOption;
import java.util.EnumSet;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.ChecksumFs;
import org.apache.hadoop.fs.CreateFlag;
import org.apache.hadoop.fs.DelegateToFileSystem;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileAlreadyExistsException;
import org.apache.hadoop.fs.Options.ChecksumOpt;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.hadoop.util.Progressable;

/**
 * LocalFiles for Spark's checkpoint manager, which uses another interface of Hadoop than tables do.
 *
 * A rename that must not replace a file is a hard link: of two drivers that write the same file of a checkpoint, one
 * fails. Hadoop's own class checks first whether the file exists, and then renames.
 *
 * A file is on disk when its rename returns, and has its name only after its contents are on disk. Hadoop syncs nothing:
 * after a power loss the plan of a batch may be missing or empty while a table has its rows, and the batch would be
 * planned again with other ends. Spark gives each file of a checkpoint its name by a rename, in an order that a crash
 * cannot break: a plan before its batch, state before the commit of its batch.
 *
 * Files get no checksums (.crc), which would have to be synced as well: twice as many syncs in each batch. Those of
 * RocksDB have checksums of their own. Files that have one, of an older version, are still verified.
 */
public final class LocalFileContext extends ChecksumFs {
    public LocalFileContext(URI uri, Configuration settings) throws IOException, URISyntaxException {
        super(new Raw(settings));
    }

    @Override
    public FSDataOutputStream createInternal(
            Path path,
            EnumSet<CreateFlag> flags,
            FsPermission mode,
            int bufferSize,
            short replication,
            long blockSize,
            Progressable progress,
            ChecksumOpt checksum,
            boolean createParent)
            throws IOException {
        return getRawFs().createInternal(
                path, flags, mode, bufferSize, replication, blockSize, progress, checksum, createParent);
    }

    /** End of the name of a checkpoint that does not outlive its run, so that nothing of it is synced. */
    private static final String TRANSIENT = ".transient";

    /** Name of the directory with such checkpoints: any other directory may have the name of one. */
    private static final String SHARED = "shared";

    private static final class Raw extends DelegateToFileSystem {
        Raw(Configuration settings) throws IOException, URISyntaxException {
            super(URI.create("file:///"), new LocalFiles.Raw(), settings, "file", false);
        }

        @Override
        public int getUriDefaultPort() {
            return -1; // there is no port
        }

        @Override
        public boolean isValidName(String name) {
            return true; // the operating system decides
        }

        @Override
        public void mkdir(Path directory, FsPermission mode, boolean createParent) throws IOException {
            java.nio.file.Path existing = file(directory);
            while (!Files.exists(existing)) {
                existing = existing.getParent();
            }
            super.mkdir(directory, mode, createParent);
            if (isTransient(directory)) {
                return;
            }
            for (var made = file(directory); !made.equals(existing); made = made.getParent()) {
                LocalFiles.sync(made.getParent());
            }
        }

        @Override
        public void renameInternal(Path from, Path to, boolean overwrite) throws IOException {
            java.nio.file.Path source = file(from);
            java.nio.file.Path target = file(to);
            if (!Files.isRegularFile(source)) {
                super.renameInternal(from, to, overwrite);
                return;
            }
            boolean isTransient = isTransient(to);
            if (!isTransient) {
                LocalFiles.sync(source);
            }
            if (overwrite || !Files.exists(target)) {
                // An older version has written it, or a crash has left it: it would not fit the file.
                Files.deleteIfExists(target.resolveSibling("." + target.getFileName() + ".crc"));
            }
            if (overwrite) {
                Files.move(source, target, StandardCopyOption.ATOMIC_MOVE);
            } else {
                linkAndDelete(source, target);
            }
            if (!isTransient) {
                LocalFiles.sync(target.getParent());
            }
        }

        private static boolean isTransient(Path path) {
            for (Path each = path; each != null; each = each.getParent()) {
                if (each.getName().endsWith(TRANSIENT) && each.getParent().getName().equals(SHARED)) {
                    return true;
                }
            }
            return false;
        }

        private static void linkAndDelete(java.nio.file.Path source, java.nio.file.Path target) throws IOException {
            try {
                Files.createLink(target, source);
            } catch (java.nio.file.FileAlreadyExistsException error) {
                throw new FileAlreadyExistsException(target + " exists");
            } catch (UnsupportedOperationException | FileSystemException error) {
                // Some mounted file systems have no links: there, two drivers may both succeed.
                if (Files.exists(target)) {
                    throw new FileAlreadyExistsException(target + " exists");
                }
                Files.move(source, target, StandardCopyOption.ATOMIC_MOVE);
                return;
            }
            Files.delete(source);
        }

        private static java.nio.file.Path file(Path path) {
            return java.nio.file.Path.of(path.toUri().getPath());
        }
    }
}
