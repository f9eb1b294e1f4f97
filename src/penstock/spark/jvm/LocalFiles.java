package penstock.spark;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/**
 * Hadoop's file system of this machine, but the mode of a file is set by Java.
 *
 * Without Hadoop's native library, which Spark from PyPI has not, Hadoop starts the program chmod for each file that it
 * makes: four times in a micro-batch, and for each file that a table gets.
 */
public final class LocalFiles extends LocalFileSystem {
    public LocalFiles() {
        super(new Raw());
    }

    static final class Raw extends RawLocalFileSystem {
        private static final int PERMISSION_BITS = 9;

        @Override
        public void setPermission(Path path, FsPermission mode) throws IOException {
            if (mode.toShort() >> PERMISSION_BITS != 0) {
                super.setPermission(path, mode); // Java knows no sticky bit
                return;
            }
            String text = mode.getUserAction().SYMBOL + mode.getGroupAction().SYMBOL + mode.getOtherAction().SYMBOL;
            Files.setPosixFilePermissions(pathToFile(path).toPath(), PosixFilePermissions.fromString(text));
        }
    }
}
